"""From a resolved configuration to a `Job`: everything that can be known to be wrong before work begins is refused.

`prepare` is run by all ranks alike and starts nothing.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import zoo
from attacks import AttackConfig
from certizoo import UserError
from registry import store
from shards import DataConfig, ShardSet, find
from trainers.job import checkpoint
from trainers.job.job import Job, certify_settings
from trainers.job.recipe import check_recipe
from trainers.job.schedule import ScheduleConfig
from trainers.job.typed import typed
from trainers.place import place
from trainers.settings import (
    DeepSpeedConfig,
    HingeConfig,
    MasksConfig,
    MixConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PenaltyConfig,
    TrainConfig,
    require,
)
from zoo.models.pretrained import check_source

IMAGES_A_GPU, IMAGES_A_CPU_RANK = 128, 8
SECOND_ORDER = ("lmce",)  # objectives that take input gradients inside `Engine.through`

log = logging.getLogger(__name__)


def prepare(config: dict[str, Any]) -> Job:
    """Check a resolved configuration and the data it names. Raises UserError naming the key, file or folder."""
    config = with_batch_size(config, place()[2])
    _refuse_password(config["registry"]["uri"])
    data = typed(DataConfig, config, "data")
    config = {**config, "model": _model_config(config["model"], data)}
    job = Job(
        config=config,
        seed=int(config["seed"]),
        run_dir=Path(config["run_dir"]),
        model=config["model"],
        data=data,
        train_set=find(data, "train"),
        test_set=_test_set(data),
        attack=typed(AttackConfig, config, "attack"),
        objective=typed(ObjectiveConfig, config, "objective"),
        penalty=typed(PenaltyConfig, config, "penalty"),
        hinge=typed(HingeConfig, config, "hinge"),
        mix=typed(MixConfig, config, "mix"),
        masks=typed(MasksConfig, config, "masks"),
        optimizer=typed(OptimizerConfig, config, "optimizer"),
        schedule=typed(ScheduleConfig, config, "schedule"),
        train=typed(TrainConfig, config, "train"),
        deepspeed=typed(DeepSpeedConfig, config, "deepspeed"),
        saved=_saved(Path(config["run_dir"]), config["resume"]),
    )
    if job.first_weights is not None:
        check_source(job.first_weights)
    world_size = place()[2]
    job.train.accumulation(world_size)  # refuses sizes that do not divide
    check_recipe(job, world_size)
    require(
        job.train.batch_size <= job.train_set.samples,
        f"train.batch_size={job.train.batch_size} is more than the {job.train_set.samples} training images; lower it",
    )
    require(
        not (job.train.compile and (job.train.grad_checkpointing or job.objective.name in SECOND_ORDER)),
        "train.compile=true works neither with train.grad_checkpointing nor with second derivatives (objective="
        f"{job.objective.name}); leave it out",
    )
    require(
        not (job.train.grad_checkpointing and job.masks.ard),
        "train.grad_checkpointing=true would draw the masks of masks.ard anew in its second pass; set one to false",
    )
    require(
        job.deepspeed.stage < 3 or job.objective.name not in SECOND_ORDER,
        f"objective={job.objective.name} differentiates an input gradient, for which deepspeed=zero3 no longer has the "
        "weights; use deepspeed=zero2",
    )
    if job.saved is not None:
        checkpoint.check_same_run(job.saved, job.fingerprint, world_size, job.run_dir)
    if job.config["certify"]["enabled"]:
        certify_settings(job)
    return job


def _refuse_password(uri: str | None) -> None:
    if uri and store.public(uri) != uri:
        raise UserError("registry.uri holds a password, which the run's files show; put it into MLFLOW_TRACKING_URI")


def with_batch_size(config: dict[str, Any], world_size: int) -> dict[str, Any]:
    """train.batch_size=null resolved: what a rank's device takes at 224 pixels, times the ranks."""
    if config["train"]["batch_size"] is not None:
        return config
    each = IMAGES_A_GPU if torch.cuda.is_available() else IMAGES_A_CPU_RANK
    return {**config, "train": {**config["train"], "batch_size": each * world_size}}


def _model_config(model: Mapping[str, Any], data: DataConfig) -> dict[str, Any]:
    """The recipe's options, on images as the data gives them."""
    require("pretrained" not in model, "weights to start from are no option of the model; write pretrained=SOURCE")
    shape = {"num_classes": data.num_classes, "img_size": data.img_size, "in_chans": data.channels}
    return {"name": model["name"], **zoo.model_options(**(shape | dict(model)))}


def _test_set(data: DataConfig) -> ShardSet | None:
    try:
        return find(data, "test")
    except UserError as error:
        if "no shards" not in str(error):
            raise
        if place()[1] == 0:
            log.warning("this run will not be evaluated, certified or registered: %s", error)
        return None


def _saved(run_dir: Path, resume: str | None) -> checkpoint.Saved | None:
    require(resume in (None, "auto"), f"resume={resume} does not exist; use resume=auto")
    if resume:
        return checkpoint.newest(run_dir)
    require(
        not run_dir.is_dir() or not any(run_dir.iterdir()),
        f"{run_dir} holds an earlier run; continue it with resume=auto, or start another with name=ANOTHER",
    )
    return None
