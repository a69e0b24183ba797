"""From a resolved configuration to a `Job`: every detectable error is raised before work begins.

All ranks and the doctor call `prepare`; it starts and writes nothing. compatibility.py lists options that exclude each
other.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zoo
from certizoo import UserError, plugins
from certizoo.attacks import AttackConfig
from certizoo.config.schema import section_of, typed_values
from certizoo.registry.server import store
from certizoo.shards import DataConfig, ShardSet, find
from certizoo.shards.format import tokens
from certizoo.shards.format.config import TEXT, require_kind
from certizoo.shards.sets import warn_of_empty_classes
from certizoo.text import shown
from trainers import ranks
from trainers.job import checkpoint
from trainers.job.auto_settings import bf16_is_emulated, resolve_auto, scale_lr
from trainers.job.compatibility import check_compatibility
from trainers.job.folder import refuse_used_folder
from trainers.job.job import Job, certify_settings
from trainers.job.keys import TrainerKeys, defaults
from trainers.job.schedule import ScheduleConfig
from trainers.job.teacher import Teacher, find_teacher
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
    require,
)
from zoo.models.pretrained import check_source
from zoo.weights import table

log = logging.getLogger(__name__)


def prepare(config: dict[str, Any], source_exists: bool = True) -> Job:
    """Check a resolved configuration and the data it names. Raises UserError naming the key, file or folder.

    Args:
        source_exists: False if an earlier stage has yet to create the file that `pretrained` names.
    """
    plugins.load()
    config = typed_values(TrainerKeys, config)
    saved = _saved(Path(config["run_dir"]), config["resume"])
    config, lines = resolve_auto(config, ranks.world_size(), saved)
    if bf16_is_emulated(config) and ranks.local_rank() == 0:
        log.warning("this CPU emulates bf16, many times slower than fp32; set train.precision=fp32")
    _refuse_password(config["registry"]["uri"])
    data = section_of(DataConfig, config["data"], "data")
    train, optimizer = (
        section_of(TrainConfig, config["train"], "train"),
        section_of(OptimizerConfig, config["optimizer"], "optimizer"),
    )
    config, optimizer, of_lr = scale_lr(config, optimizer, train.batch_size)
    config = {**config, "model": _model_config(config["model"], data)}
    job = Job(
        config=config,
        seed=config["seed"],
        run_dir=Path(config["run_dir"]),
        model=config["model"],
        data=data,
        train_set=find(data, "train"),
        test_set=_test_set(data),
        attack=section_of(AttackConfig, config["attack"], "attack"),
        objective=section_of(ObjectiveConfig, config["objective"], "objective"),
        penalty=section_of(PenaltyConfig, config["penalty"], "penalty"),
        hinge=section_of(HingeConfig, config["hinge"], "hinge"),
        mix=section_of(MixConfig, config["mix"], "mix"),
        masks=section_of(MasksConfig, config["masks"], "masks"),
        distill=section_of(DistillConfig, config["distill"], "distill"),
        teacher=find_teacher(config["distill"]["teacher"], config["registry"]["uri"]),
        optimizer=optimizer,
        schedule=section_of(ScheduleConfig, config["schedule"], "schedule"),
        train=train,
        deepspeed=section_of(DeepSpeedConfig, config["deepspeed"], "deepspeed"),
        saved=saved,
        auto_settings=(*lines, *of_lr),
    )
    if ranks.local_rank() == 0:
        warn_of_empty_classes(job.train_set, data.root)
        _warn_of_other_classes(job.teacher, data)
    if job.first_weights is True:
        table.entry(job.model["name"])
    elif source_exists and job.first_weights:
        check_source(job.first_weights)
    if job.config["certify"]["enabled"]:
        certify_settings(job)
    check_compatibility(job, ranks.world_size())
    if job.saved is not None:
        checkpoint.check_same_run(job.saved, job.fingerprint, job.run_dir, defaults())
        checkpoint.check_position(job.saved, job.steps_per_epoch, job.total_steps, job.train.batch_size)
    return job


def _refuse_password(uri: str | None) -> None:
    if uri and store.public(uri) != uri:
        raise UserError(
            "registry.uri holds a password, which the run's files would show; set MLFLOW_TRACKING_URI instead"
        )


def _model_config(model: Mapping[str, Any], data: DataConfig) -> dict[str, Any]:
    """Return the model's options with the shape of the images."""
    require("pretrained" not in model, "model.pretrained does not exist; set pretrained=SOURCE at the top level")
    require_kind(data, zoo.model_options(model["name"]), model["name"])
    shape: dict[str, Any] = {"num_classes": data.num_classes, "img_size": data.img_size}
    if data.kind == TEXT:
        shape["vocabulary"] = len(tokens.load(data.tokens).words)
    else:
        shape["in_chans"] = data.channels
    return {"name": model["name"], **zoo.model_options(**(shape | dict(model)))}


def _warn_of_other_classes(teacher: Teacher | None, data: DataConfig) -> None:
    of = teacher.config.get("data") if teacher else None
    if isinstance(of, Mapping) and (name := of.get("name")) != data.name:
        log.warning("the teacher was trained on %s, not on %s; its classes must mean the same", shown(name), data.name)


def _test_set(data: DataConfig) -> ShardSet | None:
    try:
        return find(data, "test")
    except UserError as error:
        if "no shards" not in str(error):
            raise
        if ranks.local_rank() == 0:
            log.warning("this run will not be evaluated, certified or registered: %s", error)
        return None


def _saved(run_dir: Path, resume: str | None) -> checkpoint.Saved | None:
    refuse_used_folder(run_dir, resume)
    return checkpoint.to_resume(run_dir) if resume else None
