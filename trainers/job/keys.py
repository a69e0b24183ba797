"""All keys of a trainer's configuration: configs/adv_train.yaml, std_train.yaml and constrain.yaml."""

import json
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any

from certify.stage.settings import Settings as CertifySettings
from certizoo.attacks import AttackConfig
from certizoo.config.schema import Count, Lt, MinLen, OneOf, PathText, Section, Source, Text, Whole
from certizoo.registry.tracking.checks import ExperimentName, ModelName
from certizoo.shards import DataConfig
from trainers.job.schedule import ScheduleConfig
from trainers.settings import (
    ConstrainConfig,
    DeepSpeedConfig,
    DistillConfig,
    HingeConfig,
    MasksConfig,
    MixConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PenaltyConfig,
    TrainKeys,
)


@dataclass(frozen=True)
class CertifyKeys(CertifySettings):
    """`certify`: the certify stage after training."""

    enabled: bool = True


@dataclass(frozen=True)
class RegistryKeys(Section):
    """`registry`: tracking in MLflow and the registered version."""

    enabled: bool
    experiment: ExperimentName
    model_name: ModelName
    champion_images: Count = 300
    uri: str | None = None
    tags: dict[str, Text] | None = None


@dataclass(frozen=True)
class TrainerKeys(Section):
    """The whole configuration."""

    model: dict[str, Any]
    data: DataConfig
    attack: AttackConfig
    objective: ObjectiveConfig
    penalty: PenaltyConfig
    hinge: HingeConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    deepspeed: DeepSpeedConfig
    train: TrainKeys
    mix: MixConfig
    masks: MasksConfig
    distill: DistillConfig
    certify: CertifyKeys
    registry: RegistryKeys
    name: Annotated[Text, MinLen(1)]
    run_dir: PathText
    seed: Annotated[Whole, Lt(2**63)] = 0
    pretrained: Annotated[bool, OneOf(True)] | Source | None = None
    resume: Annotated[str, OneOf("auto")] | None = None
    constrain: ConstrainConfig | None = None


def defaults(section: Any = TrainerKeys, prefix: str = "") -> dict[str, Any]:
    """Return the defaults of all keys that have one, flat, as a checkpoint's fingerprint would hold them."""
    found: dict[str, Any] = {}
    for own in fields(section):
        if isinstance(own.type, type) and is_dataclass(own.type):
            found |= defaults(own.type, f"{prefix}{own.name}.")
        elif own.default is not MISSING:
            found[prefix + own.name] = json.loads(json.dumps(own.default))
    return found
