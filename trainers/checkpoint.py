"""Checkpoints that survive being killed while they are written.

    run_dir/checkpoints/step00000500/{DeepSpeed's files, complete.json}

`complete.json` is written last and names every file with its size; a folder without it, or with a file that is
shorter, does not count. No random state is stored: each step derives its own from (seed, step, rank).
"""

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certizoo import UserError
from certizoo.files import write_whole

if TYPE_CHECKING:  # DeepSpeed takes seconds to import; reading a checkpoint's mark does not need it
    from trainers.engine import Engine

log = logging.getLogger(__name__)
MARK = "complete.json"

# What may change between a run and its continuation: nothing that the weights depend on.
FREE = (
    "name", "run_dir", "resume", "certify", "registry", "data.root", "data.test", "data.verify",
    "train.eval_images", "train.log_every", "train.checkpoint_every", "train.keep_checkpoints",
    "deepspeed.timeout_minutes",
)  # fmt: skip


@dataclass(frozen=True)
class Position:
    """Optimiser steps done: in all, and in the current epoch (epochs count from 0)."""

    step: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0


@dataclass(frozen=True)
class Saved:
    """What `complete.json` tells."""

    tag: str
    position: Position
    world_size: int
    run_id: str | None
    fingerprint: dict[str, Any]


def folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def fingerprint(config: Mapping[str, Any], data_digest: str) -> dict[str, Any]:
    """The keys that decide the weights, flat: {"train.epochs": 3, ...}, and the digest of the training shards."""
    flat = _flat(config) | {"data shards": data_digest}
    return {key: value for key, value in flat.items() if not any(key == f or key.startswith(f + ".") for f in FREE)}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def newest(run_dir: Path) -> Saved | None:
    """The newest complete checkpoint; newer ones that are not complete are named in a warning."""
    for path in sorted(folder(run_dir).glob("step*"), reverse=True):
        saved = _read(path)
        if saved is not None:
            return saved
        log.warning("%s is not complete (the run was stopped while writing it); using the one before", path)
    return None


def _read(path: Path) -> Saved | None:
    try:
        mark = json.loads((path / MARK).read_text())
        whole = all((path / name).stat().st_size == size for name, size in mark["files"].items())
        position = Position(**mark["position"])
        saved = Saved(path.name, position, mark["world_size"], mark["run_id"], mark["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return saved if whole else None


def check_same_run(saved: Saved, now: Mapping[str, Any], world_size: int, run_dir: Path) -> None:
    """Raise UserError naming the first key that differs, or the number of ranks."""
    for key in sorted({*saved.fingerprint, *now}):
        then, value = saved.fingerprint.get(key), now.get(key)
        if then != value:
            raise UserError(
                f"{run_dir} was trained with {key}={then}, this command says {key}={value}; "
                "resume with the same settings, or start anew with name=ANOTHER"
            )
    if saved.world_size != world_size:
        raise UserError(
            f"{run_dir} was trained by {saved.world_size} ranks, now there are {world_size}; start as many "
            f"(`deepspeed --num_gpus {saved.world_size} ...`), or start anew with name=ANOTHER"
        )


def save(engine: "Engine", run_dir: Path, saved: Saved, keep: int) -> None:
    """Collective. After it returns, on every rank, the checkpoint is complete and older ones but `keep` are gone."""
    path = folder(run_dir) / saved.tag
    if engine.world.rank == 0:
        (path / MARK).unlink(missing_ok=True)  # a damaged folder of the same step is written over
    engine.world.barrier()
    engine.save(folder(run_dir), saved.tag)  # ends with a barrier: all ranks have written
    if engine.world.rank == 0:
        files = {str(file.relative_to(path)): file.stat().st_size for file in path.rglob("*") if file.is_file()}
        record = {key: value for key, value in asdict(saved).items() if key != "tag"} | {"files": files}
        write_whole(path / MARK, json.dumps(record, indent=1))
        _prune(run_dir, keep)
    engine.world.barrier()


def _prune(run_dir: Path, keep: int) -> None:
    complete = [path for path in sorted(folder(run_dir).glob("step*")) if (path / MARK).is_file()]
    for path in complete[:-keep]:
        (path / MARK).unlink()  # first: a folder half deleted must not count as complete
        shutil.rmtree(path)


def tag(step: int) -> str:
    return f"step{step:08d}"
