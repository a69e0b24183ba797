"""One search as values: the driver's options, and the command line of each trial.

    STORAGE/NAME/search.json            this, for `--resume`
    STORAGE/NAME/trials/ID/run-1/       a trial's run folder; run-2 after the loss of its node, and so on
    STORAGE/NAME/trials/ID/run-1.log    the trainer's output
    STORE/NAME/ID/checkpoint_000003/    with an object store: the newest two; the last has hand-over and certificate

STORAGE and STORE are set by `--storage`.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from certizoo import UserError
from certizoo.commit import ROOT
from certizoo.config.compose import compose_config
from certizoo.documents import read_json
from certizoo.files import write_whole
from certizoo.locks import HOLDER, LOCK
from tuning import objectives, spaces
from tuning.objectives import Objective
from tuning.spaces import Space

SETTINGS = "search.json"
LOOKED_AT = 32  # test images by which trials are compared while they train
CERTIFIED = {"constrain": "finetune"}  # trainer -> the stage that is certified, a folder in its run folder


@dataclass(frozen=True)
class Search:
    """The options of a search.

    Attributes:
        space: the name of the search space; `space_content` is the content of its file when the search began.
        overrides: the whole fixed part of a trial's command line.
        resources: what a trial takes on each of its `nodes`.
        wait: start the search even if no node can run a trial yet.
        store: URL of an object store for checkpoints and finished trials, or ''. With it, `storage` is a local folder
            of each node.
        id: tells this search from others with its name, in a registry that they share.
    """

    name: str
    space: str
    storage: str
    overrides: tuple[str, ...]
    metric: tuple[str, ...]
    num_samples: int
    max_concurrent: int | None
    resources: Mapping[str, float]
    scheduler: str
    search: str
    seed: int
    max_failures: int
    trainer: str
    epochs: int
    nodes: int = 1
    wait: bool = False
    store: str = ""
    space_content: Mapping[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        """Keep the space as it is now: the file may be edited before the search is resumed."""
        if not self.space_content:
            object.__setattr__(self, "space_content", spaces.read(self.space))

    @property
    def folder(self) -> Path:
        return Path(self.storage) / self.name

    @property
    def objectives(self) -> tuple[Objective, ...]:
        return tuple(objectives.parse(text) for text in self.metric)

    @property
    def shown(self) -> tuple[Objective, ...]:
        """Return the displayed figures of a trial: the objectives, and attacked beside certified accuracy."""
        return objectives.with_attacked(self.objectives)

    @property
    def compared_every(self) -> int:
        """Return the epochs between comparisons of trials, a quarter of the training."""
        return _quarter(self.epochs)

    @property
    def parameters(self) -> Space:
        return spaces.of(self.space, self.space_content, f"{self.folder / SETTINGS}: {self.space}")

    @property
    def ranks(self) -> int:
        """Return the ranks of a trial on each of its nodes: one per GPU, else one per CPU."""
        return max(1, int(self.resources.get("GPU") or self.resources.get("CPU", 1)))

    def certified_run(self, run_dir: Path) -> Path:
        """Return the folder of the run that is certified."""
        return run_dir / CERTIFIED.get(self.trainer, "")

    @property
    def data_root(self) -> str:
        """Return the root of the trials' shards."""
        return str(compose_config(self.trainer, self.overrides)["data"]["root"])

    @property
    def script(self) -> Path:
        return ROOT / "trainers" / f"{self.trainer}.py"

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / SETTINGS, json.dumps(asdict(self), indent=1))

    def trial_overrides(self, trial: str, point: spaces.Point, run_dir: Path) -> list[str]:
        """Return the command line of a trial.

        Its version in the registry records the search, the space and the values. The registry's place is in the
        environment (`certizoo/registry/server/credentials.py`).
        """
        values = self.parameters.values(point)
        tags = {"space": self.space, "search": self.name, "search_id": self.id, "trial": f"{self.name}/{trial}"}
        tags |= {f"param.{key}": str(value) for key, value in values.items()}
        return [
            *self.overrides,
            *(f"{key}={value}" for key, value in values.items()),
            f"name={_quoted(f'{self.name}-{trial}')}",
            f"run_dir={_quoted(str(run_dir))}",
            "resume=auto",
            "registry.tags={" + ",".join(f"{key}:{_quoted(text)}" for key, text in tags.items()) + "}",
        ]


def load(folder: Path) -> Search:
    """Load the search in `folder`."""
    if not (folder / SETTINGS).is_file():
        raise UserError(f"{folder} holds no search ({SETTINGS} is missing); check --storage and --resume")
    content = read_json(folder / SETTINGS)
    return Search(**content | {key: tuple(content[key]) for key in ("overrides", "metric")})


def begun(folder: Path) -> bool:
    """Return True if the folder holds more than the caller's lock."""
    return any(path.name not in (LOCK, HOLDER) for path in folder.iterdir())


def newest(storage: Path) -> Path:
    """Return the most recently started search."""
    found = sorted(storage.glob(f"*/{SETTINGS}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(f"there is no search in {storage} to resume; start one with --space NAME")
    return found[-1].parent


def fixed_overrides(space: Space, metric: Sequence[str], given: Sequence[str], trainer: str) -> tuple[list[str], int]:
    """Return (the fixed part of every trial's command line, epochs of a trial), checked by composing it.

    The user's overrides, `given`, come last and take priority. The objectives' radii join certify.eps, and the first of
    them elects the champion. Paths become absolute, because a trial runs in another folder.
    """
    from certify.shared.ball import known
    from certify.stage.settings import EPS
    from trainers.settings import TrainConfig

    wanted = [objectives.parse(text) for text in metric]
    radii = [objective for objective in wanted if objective.eps]
    own_model = any(override.lstrip("+").startswith("model=") for override in given)
    looks = [f"train.certify_images={LOOKED_AT if radii else 0}"]
    fixed = [*(() if own_model else space.without_model), *space.overrides, *looks, *given]
    config = compose_config(trainer, fixed)
    asked = config["certify"]["eps"]
    grid = objectives.grid_with(EPS[known(config["certify"]["norm"])] if asked is None else asked, wanted)
    fixed += [f"certify.eps={grid}", f"data.root={_quoted(_anywhere(config['data']['root']))}"]
    if not config["train"]["eval_images"] and not any("train.eval_images=" in override for override in given):
        fixed.append(f"train.eval_images={TrainConfig.eval_images}")  # a recipe may train without evaluation
    if radii:
        fixed.append(f"certify.headline_eps={radii[0].radius(grid)}")
        fixed.append(f"train.certify_eps={sorted({objective.radius(grid) for objective in radii})}")
        fixed.append(f"train.certify_every={_quarter(_epochs(config, trainer))}")
    config = compose_config(trainer, [*fixed, *(f"{key}={value}" for key, value in _middle(space).items())])
    if not config["certify"]["enabled"] or not config["registry"]["enabled"]:
        raise UserError(
            "a search needs certificates and the registry; set certify.enabled=true and registry.enabled=true"
        )
    if config["registry"]["uri"]:
        raise UserError("a search does not use registry.uri; set MLFLOW_TRACKING_URI instead")
    if radii and not config["train"]["certify_images"]:
        raise UserError("a search compares trials by train.certify_images test images; set it above 0")
    if not config["train"]["eval_images"]:
        raise UserError("a search follows trials by train.eval_images test images; set it above 0")
    return fixed, _epochs(config, trainer)


def find_data(search: Search) -> Search:
    """Make the digits if they are missing, then check everything that the trainer checks before it starts.

    Returns the search with certificates of test images disjoint from those by which trials are compared.
    """
    from trainers.job.stages import prepare_first

    nowhere = f"run_dir={_quoted(str(search.folder / 'none'))}"
    config = compose_config(search.trainer, [*search.overrides, "resume=auto", nowhere])
    root = Path(config["data"]["root"])
    if config["data"]["name"] == "digits" and not (root / "digits.json").is_file():
        import certizoo.shards.__main__

        certizoo.shards.__main__.main(["digits", str(root)])
    looked_at, config["train"]["certify_images"] = config["train"]["certify_images"], 0
    test_set = prepare_first(config).test_set
    if test_set is None:
        raise UserError(f"a search needs test images to certify; put test shards into {root}")
    reported, wanted = test_set.samples - looked_at, config["certify"]["images"]
    if reported < 1:
        raise UserError(f"{root} has {test_set.samples} test images, and train.certify_images={looked_at}; lower it")
    if wanted is not None and wanted <= reported:
        return search
    return replace(search, overrides=(*search.overrides, f"certify.images={reported}"))


def _epochs(config: Mapping[str, Any], trainer: str) -> int:
    """Return the epochs of the stage that is certified."""
    return int(config["constrain"]["finetune_epochs"] if trainer == "constrain" else config["train"]["epochs"])


def _quarter(epochs: int) -> int:
    return max(1, epochs // 4)


def _middle(space: Space) -> dict[str, Any]:
    """Return some point of the space: enough to find a key that does not exist before anything is started."""
    return space.values({key: p.options[0] if p.options else p.high for key, p in space.parameters.items()})


def _anywhere(root: str) -> str:
    """Return data.root in a form that is valid from every folder."""
    from certizoo.shards.format.config import is_remote

    return root if is_remote(root) else str(Path(root).expanduser().absolute())


def _quoted(text: str) -> str:
    """Quote a string for Hydra's grammar, in which a backslash is literal unless a quote follows."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"
