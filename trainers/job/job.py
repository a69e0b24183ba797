"""One training run as values; `prepare.py` makes it, checked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks import AttackConfig
from certify.stage.settings import Settings as CertifySettings
from shards import DataConfig, ShardSet, steps_per_epoch
from trainers.job import checkpoint
from trainers.job.schedule import ScheduleConfig
from trainers.job.typed import typed
from trainers.settings import (
    DeepSpeedConfig,
    HingeConfig,
    MasksConfig,
    MixConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PenaltyConfig,
    TrainConfig,
)

HANDOVER = "handover"  # the folder with float32 weights and the configuration, in that of the run


@dataclass(frozen=True)
class Job:
    """A run as values. `config` is the whole resolved configuration; `model` what `zoo.create_model` takes; `settled`
    what the command left open (settle.py), for the person."""

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
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    train: TrainConfig
    deepspeed: DeepSpeedConfig
    saved: checkpoint.Saved | None
    auto_settings: tuple[str, ...]

    @property
    def first_weights(self) -> str | bool | None:
        """The source of pretrained weights, True for those of the name itself; a resumed run has its own and needs
        none."""
        return None if self.saved else self.config["pretrained"]

    @property
    def handover(self) -> Path:
        """What the run leaves behind."""
        return self.run_dir / HANDOVER

    @property
    def fingerprint(self) -> dict[str, Any]:
        return checkpoint.fingerprint(self.config, self.train_set.digest)

    def steps_per_epoch(self, world_size: int) -> int:
        """Optimiser steps; micro-batches left over at the end of an epoch are dropped."""
        batches = steps_per_epoch(self.train_set, self.train.micro_batch(world_size), world_size)
        return batches // self.train.accumulation(world_size)

    def total_steps(self, world_size: int) -> int:
        """Optimiser steps of the whole run: train.epochs, cut by train.max_steps."""
        steps = self.train.epochs * self.steps_per_epoch(world_size)
        return min(steps, self.train.max_steps or steps)


def certify_settings(job: Job) -> CertifySettings:
    """The `certify` keys, typed."""
    keys = {key: value for key, value in job.config["certify"].items() if key != "enabled"}
    return typed(CertifySettings, {"certify": keys}, "certify")
