"""Checkpoints that survive being killed while they are written.

    run_dir/checkpoints/step00000500/{DeepSpeed's files, ema.safetensors, complete.json}

A checkpoint is written to a temporary folder (trainers/weights/saving.py), read again and compared with its checksums,
given `complete.json`, which names every file with its size, and only then renamed; a folder without that mark, or with
a file that is shorter, does not count. No random state is stored: each step derives its own from (seed, step, rank).
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from certizoo import UserError

log = logging.getLogger(__name__)
MARK = "complete.json"

# What may change between a run and its continuation: nothing that the weights depend on.
FREE = (
    "name", "run_dir", "resume", "certify", "registry", "data.root", "data.test", "data.verify",
    "data.cache", "data.cache_gb", "data.timeout",
    "train.eval_images", "train.log_every", "train.checkpoint_every", "train.keep_checkpoints",
    "deepspeed.timeout_minutes",
)  # fmt: skip


@dataclass(frozen=True)
class Position:
    """Optimiser steps done: in all, and in the current epoch (epochs count from 0)."""

    step: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0

    def after_step(self, steps_per_epoch: int) -> "Position":
        """One step further."""
        batch = self.batch_in_epoch + 1
        ends = batch == steps_per_epoch
        return Position(self.step + 1, self.epoch + ends, 0 if ends else batch)

    @property
    def ends_epoch(self) -> bool:
        """Between two epochs."""
        return self.step > 0 and self.batch_in_epoch == 0


@dataclass(frozen=True)
class Saved:
    """What `complete.json` tells. `world_size` None: any number of ranks can load it (trainers/reshape.py)."""

    tag: str
    position: Position
    world_size: int | None
    run_id: str | None
    fingerprint: dict[str, Any]


def folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def folders(run_dir: Path) -> list[Path]:
    """Of all checkpoints, complete or not, by step."""
    return sorted(folder(run_dir).glob("step*"))


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
    for path in reversed(folders(run_dir)):
        saved = read(path)
        if saved is not None:
            return saved
        log.warning("%s is not complete (the run was stopped while writing it); using the one before", path)
    return None


def read(path: Path) -> Saved | None:
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
    if saved.world_size not in (None, world_size):
        raise UserError(
            f"{run_dir} was trained by {saved.world_size} ranks, now there are {world_size}; start as many "
            f"(`deepspeed --num_gpus {saved.world_size} ...`), or convert its last epoch's end for any number: "
            f"`python -m trainers.reshape {run_dir}`"
        )


def tag(step: int) -> str:
    return f"step{step:08d}"
