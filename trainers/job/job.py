"""One training run as values; `prepare.py` creates and checks it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from certify.stage.settings import Settings as CertifySettings
from certizoo.attacks import AttackConfig
from certizoo.config.schema import section_of
from certizoo.shards import DataConfig, ShardSet, steps_per_epoch
from trainers.job import checkpoint
from trainers.job.schedule import ScheduleConfig
from trainers.job.teacher import Teacher
from trainers.settings import (
    DeepSpeedConfig,
    DistillConfig,
    HingeConfig,
    MasksConfig,
    MixConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PenaltyConfig,
    TrainConfig,
)
from zoo.handover import RUN_FOLDER


@dataclass(frozen=True)
class Job:
    """A run as values.

    `config` is the whole resolved configuration and `model` the arguments of `zoo.create_model`. `auto_settings` lists
    what auto_settings.py chose, for display.
    """

    config: dict[str, Any]
    seed: int
    run_dir: Path
    model: dict[str, Any]
    data: DataConfig
    train_set: ShardSet
    test_set: ShardSet | None
    attack: AttackConfig
    objective: ObjectiveConfig
    penalty: PenaltyConfig
    hinge: HingeConfig
    mix: MixConfig
    masks: MasksConfig
    distill: DistillConfig
    teacher: Teacher | None
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    train: TrainConfig
    deepspeed: DeepSpeedConfig
    saved: checkpoint.Saved | None
    auto_settings: tuple[str, ...]

    @property
    def first_weights(self) -> str | bool | None:
        """Return the source of pretrained weights, True for those of the name itself; None for a resumed run."""
        return None if self.saved and self.saved.position.step else self.config["pretrained"]

    @property
    def handover(self) -> Path:
        """Return the folder of the hand-over."""
        return self.run_dir / RUN_FOLDER

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Return what a resumed run compares. A teacher counts by its content, wherever it lies."""
        teacher = {"distill.teacher": self.teacher.digest} if self.teacher else {}
        return checkpoint.fingerprint(self.config, self.train_set.digest) | teacher

    @property
    def steps_per_epoch(self) -> int:
        """Return the optimiser steps of an epoch; the last one is filled up with images of the epoch."""
        return steps_per_epoch(self.train_set, self.train.batch_size)

    @property
    def total_steps(self) -> int:
        """Return the optimiser steps of the whole run: train.epochs, cut by train.max_steps."""
        steps = self.train.epochs * self.steps_per_epoch
        return min(steps, self.train.max_steps or steps)


def certify_settings(job: Job) -> CertifySettings:
    """Return the typed `certify` keys."""
    keys = {key: value for key, value in job.config["certify"].items() if key != "enabled"}
    return section_of(CertifySettings, keys, "certify")
