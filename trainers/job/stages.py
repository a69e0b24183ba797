"""CertViT's three stages (trainers/certvit/run.py) as jobs, all checked before the first begins."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from certizoo.config.schema import section_of, typed_values
from trainers import ranks
from trainers.job.compatibility import check_constrain
from trainers.job.folder import refuse_changed, refuse_used_folder
from trainers.job.job import Job
from trainers.job.keys import TrainerKeys
from trainers.job.prepare import prepare
from trainers.settings import ConstrainConfig, require
from zoo.handover import WEIGHTS

Config = dict[str, Any]


@dataclass(frozen=True)
class Stages:
    """The stages in `folder`. `adapt` is the job of stage 1 and states model and images of stage 2."""

    config: Config
    settings: ConstrainConfig
    folder: Path
    adapt: Job

    @property
    def weights(self) -> str:
        """Return the weights that stage 2 constrains: those of stage 1, or `pretrained`."""
        return str(self.adapt.handover / WEIGHTS) if self.settings.adapt_epochs else str(self.config["pretrained"])

    @property
    def constrained(self) -> Path:
        """Return the hand-over of stage 2."""
        return self.folder / "constrained"

    def finetune(self, source_exists: bool = True) -> Job:
        """Return the job of stage 3, certified and published as configured."""
        own = {key: self.config[key] for key in ("certify", "registry")}
        own |= {"pretrained": str(self.constrained / WEIGHTS)}
        return prepare(stage(self.config, "finetune", self.settings.finetune_epochs) | own, source_exists)

    def refuse_changed(self) -> None:
        """Raise UserError if another run has written to the folder since this was prepared."""
        refuse_used_folder(self.folder, self.config["resume"])
        refuse_changed(self.adapt)

    @property
    def report(self) -> Path:
        """Return the last file that stage 2 writes."""
        return self.constrained / "report.json"

    @property
    def settings_file(self) -> Path:
        """Return the file with `settings_text`, beside the layers."""
        return self.folder / "layers" / "settings.json"

    @property
    def settings_text(self) -> str:
        """Return the settings that the constrained layers depend on."""
        found = {"constrain": vars(self.settings), "seed": self.adapt.seed, "weights": self.weights}
        return json.dumps(found | {"model": self.adapt.model}, indent=1, sort_keys=True, default=str)


def prepare_stages(config: Config) -> Stages:
    """Check the whole CertViT configuration. Raises UserError as `prepare` does."""
    config = typed_values(TrainerKeys, config)
    settings, folder = section_of(ConstrainConfig, config["constrain"], "constrain"), Path(config["run_dir"])
    refuse_used_folder(folder, config["resume"])
    epochs = settings.adapt_epochs or settings.finetune_epochs or 1
    stages = Stages(config, settings, folder, prepare(stage(config, "adapt", epochs)))
    check_constrain(stages.adapt, ranks.world_size(), settings)
    if settings.finetune_epochs:
        stages.finetune(source_exists=False)
    if stages.settings_file.is_file() and not stages.report.is_file():
        require(
            stages.settings_file.read_bytes() == stages.settings_text.encode(),
            f"{stages.settings_file.parent} was made with other settings; set another name=...",
        )
    return stages


def stage(config: Config, name: str, epochs: int) -> Config:
    """Return the configuration of one of the ordinary runs, neither certified nor published."""
    off = {key: config[key] | {"enabled": False} for key in ("certify", "registry")}
    places = [name for name in config["train"]["log_to"] if name != "mlflow"]
    train = config["train"] | {"epochs": epochs, "log_to": places}
    own = {"name": f"{config['name']}-{name}", "run_dir": str(Path(config["run_dir"]) / name)}
    return config | off | own | {"train": train}


def prepare_first(config: Config) -> Job:
    """Check any trainer's configuration and return its first job."""
    return prepare_stages(config).adapt if "constrain" in config else prepare(config)
