"""Checkpoints that survive being killed while they are written.

    run_dir/checkpoints/step00000500/{rank00000.safetensors ..., buffers.safetensors, ema.safetensors, complete.json}

A checkpoint is written to a temporary folder (trainers/weights/saving.py), read again and compared. It then gets the
mark `complete.json`, which lists every file with its size and digest, and is renamed. A folder without the mark, or
with a shorter file, does not count. No random state is stored: each step derives its own from (seed, step, rank). A
mark may come from anywhere, so it is checked, and it can name files of its own folder only.
"""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from certizoo import UserError
from certizoo.documents import read_json
from certizoo.reading import Reading

log = logging.getLogger(__name__)
MARK = "complete.json"
STARTED = "started.json"  # in the run folder: the mark of step 0, which no checkpoint is written for
MAX_WORKERS = 512
FORMAT = 2  # another number is refused
FILE = re.compile(r"(rank\d{5}|buffers|ema)\.safetensors")
TAG, DIGEST = re.compile(r"step\d{8,15}"), re.compile("[0-9a-f]{64}")

# Keys that may change between a run and its continuation: the weights do not depend on them.
FREE = (
    "name", "run_dir", "resume", "certify", "registry", "data.root", "data.test", "data.verify",
    "data.cache", "data.cache_gb", "data.timeout", "data.mix",  # the shares are in the shards' digest
    "train.eval_images", "train.certify_images", "train.certify_every", "train.certify_eps", "train.certify_seconds",
    "train.log_every", "train.checkpoint_every", "train.checkpoint_epochs", "train.keep_checkpoints",
    "train.log_to", "train.callbacks", "train.profile", "deepspeed.timeout_minutes",
)  # fmt: skip
LENGTH = ("train.epochs", "train.max_steps")  # keys that may grow


@dataclass(frozen=True)
class Position:
    """The number of optimiser steps done: in all, and in the current epoch (epochs count from 0).

    `before` lists what other numbers of ranks have read of the epoch: `Reading`s without names.
    """

    step: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0
    before: tuple[tuple[int, ...], ...] = ()

    def after_step(self, steps_per_epoch: int) -> "Position":
        """Return the position one step later."""
        batch = self.batch_in_epoch + 1
        if batch == steps_per_epoch:
            return Position(self.step + 1, self.epoch + 1)
        return replace(self, step=self.step + 1, batch_in_epoch=batch)

    @property
    def ends_epoch(self) -> bool:
        """Return True between two epochs."""
        return self.step > 0 and self.batch_in_epoch == 0

    @property
    def readings(self) -> list[Reading]:
        return [Reading(*values) for values in self.before]

    def batches(self, reading: Reading, batch_size: int) -> int:
        """Return how many batches each rank of `reading` has drawn of the epoch; a step takes `batch_size` images."""
        drawn = self.batch_in_epoch * batch_size - sum(before.drawn for before in self.readings)
        return drawn // (reading.ranks * reading.batch_size)


@dataclass(frozen=True)
class Saved:
    """The contents of `complete.json`.

    `files` holds sizes, `sha256` digests.
    """

    tag: str
    position: Position
    world_size: int
    fingerprint: dict[str, Any]
    files: dict[str, int] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)

    def mark(self) -> str:
        """Return the text of `complete.json`."""
        return json.dumps({"format": FORMAT} | {k: v for k, v in asdict(self).items() if k != "tag"}, indent=1)

    @property
    def of_ranks(self) -> list[str]:
        """Return the ranks' files."""
        return [name for name in self.files if name.startswith("rank")]

    def position_for(self, ranks: int) -> Position:
        """Return the position for this number of ranks: within an epoch, others go on with what these have left."""
        at, train = self.position, self.fingerprint
        if ranks == self.world_size or not at.batch_in_epoch:
            return at
        size = train["train.batch_size"]
        micro = train["train.micro_batch_size"] or size // self.world_size
        reading = Reading(self.world_size, max(train["data.workers"], 1), micro, 0)
        done = reading._replace(batches=at.batches(reading, size))
        return replace(at, before=(*at.before, tuple(done)))


def folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def folders(run_dir: Path) -> list[Path]:
    """Return the folders of all checkpoints, complete or not, ordered by step."""
    return sorted(path for path in folder(run_dir).glob("step*") if TAG.fullmatch(path.name))


def fingerprint(config: Mapping[str, Any], data_digest: str) -> dict[str, Any]:
    """Return the keys that determine the weights, flat, {"train.epochs": 3, ...}, and the training shards' digest.

    Tuples become lists, as in the mark of a checkpoint.
    """
    flat = _flat(config) | {"data shards": data_digest}
    decide = {key: value for key, value in flat.items() if not any(key == f or key.startswith(f + ".") for f in FREE)}
    return json.loads(json.dumps(decide))


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def newest(run_dir: Path) -> Saved | None:
    """Return the newest complete checkpoint; warn about newer incomplete ones."""
    for path in reversed(folders(run_dir)):
        saved = read(path)
        if saved is not None:
            return saved
        log.warning("%s is incomplete (the run was stopped while writing it); using the previous one", path)
    return None


def to_resume(run_dir: Path) -> Saved | None:
    """Return the point to continue from: the newest checkpoint, or the start if there is none yet.

    Raises UserError if all its checkpoints are damaged: the run would begin at step 0 again, beside its old rows.
    """
    saved, found = newest(run_dir), folders(run_dir)
    if saved is None and found:
        raise UserError(
            f"{found[-1]} is damaged, and so are all {len(found)} checkpoints of the run; restore their files, or "
            f"delete {folder(run_dir)} to begin at step 0"
        )
    return saved or _started(run_dir / STARTED)


def _started(path: Path) -> Saved | None:
    """Return the mark of step 0; None for a run that was killed before it wrote one."""
    if not _is_file(path):
        return None
    try:
        return _saved(tag(0), read_json(path))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a valid mark ({str(error)[:100]}); start anew with name=ANOTHER") from None


def read(path: Path) -> Saved | None:
    """Read the mark; None for a folder without one or with a missing or shorter file, as a killed run leaves it.

    Raises:
        UserError: no run of this version wrote the mark.
    """
    if not _is_file(path / MARK):
        return None
    mark = read_json(path / MARK)
    if isinstance(mark, dict) and mark.get("format") != FORMAT:
        raise UserError(f"{path} was written by another version; use that version, or start anew with name=ANOTHER")
    try:
        saved = _saved(path.name, mark)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path / MARK} is not a valid mark ({str(error)[:100]}); delete {path} to resume from the "
            "previous checkpoint"
        ) from None
    whole = all(_is_file(path / name) and (path / name).stat().st_size == size for name, size in saved.files.items())
    return saved if whole else None


def _saved(name: str, mark: dict[str, Any]) -> Saved:
    """Check the type of every value. Raises ValueError, KeyError or TypeError."""
    given = dict(mark["position"])
    before = tuple(tuple(Reading(*values)) for values in given.pop("before"))
    position = Position(**given, before=before)
    ranks = mark["world_size"]
    counts = [*given.values(), *mark["files"].values(), *chain(*before), ranks]
    right = all(type(count) is int and 0 <= count < 2**53 for count in counts)
    if not right or tag(position.step) != name:
        raise ValueError(f"invalid counts: {position}, {ranks} ranks")
    if not all(FILE.fullmatch(file) and DIGEST.fullmatch(mark["sha256"][file]) for file in mark["files"]):
        raise ValueError("a file that does not belong to a checkpoint")
    if not isinstance(mark["fingerprint"], dict):
        raise ValueError("an invalid fingerprint")
    return Saved(name, position, ranks, mark["fingerprint"], mark["files"], mark["sha256"])


def _is_file(path: Path) -> bool:
    """Return True for a regular file: a link could lead anywhere, and reading a pipe could block forever."""
    return not path.is_symlink() and path.is_file()


def grown(saved: Saved, now: Mapping[str, Any]) -> list[str]:
    """Return the keys of LENGTH that make the run longer than it was."""
    return [key for key in LENGTH if _longer(saved.fingerprint.get(key), now.get(key))]


def _longer(then: object, now: object) -> bool:
    return isinstance(then, int) and (now is None or (isinstance(now, int) and now > then))


def check_same_run(
    saved: Saved, now: Mapping[str, Any], run_dir: Path, defaults: Mapping[str, Any] | None = None
) -> None:
    """Raise UserError naming the first key that differs. A run may become longer, and its ranks more or fewer.

    A key that the version of the checkpoint did not have had its default.
    """
    given = {key: value for key, value in (defaults or {}).items() if key in now} | saved.fingerprint
    for key in sorted({*given, *now} - {*grown(saved, now)}):
        then, value = given.get(key), now.get(key)
        if then != value:
            fix = "give at least as many" if key in LENGTH else "resume with the same settings"
            raise UserError(
                f"{run_dir} was trained with {key}={str(then)[:100]}, but this command has {key}={value}; "
                f"{fix}, or start anew with name=ANOTHER"
            )


def check_position(saved: Saved, steps_per_epoch: int, total_steps: int, batch_size: int) -> None:
    """Raise UserError if no run of `total_steps` steps of `batch_size` images ever has the checkpoint's position."""
    at = saved.position
    counted = at.batch_in_epoch < steps_per_epoch and at.epoch + at.batch_in_epoch <= at.step <= total_steps
    possible = [_divides(batch_size, reading) for reading in (*at.readings, Reading(saved.world_size, 1, 1, 1))]
    drawn = sum(reading.drawn for reading in at.readings)
    if not counted or not all(possible) or drawn > at.batch_in_epoch * batch_size:
        raise UserError(
            f"{saved.tag} claims {at} of {saved.world_size} ranks, which no run of {total_steps} steps, "
            f"{steps_per_epoch} per epoch, reaches; delete it to resume from the previous checkpoint"
        )


def _divides(batch_size: int, reading: Reading) -> bool:
    """Return True if ranks can read a batch of this size so."""
    each = reading.ranks * reading.batch_size
    return each > 0 and batch_size % each == 0 and 0 < reading.workers <= MAX_WORKERS and reading.batches > 0


def tag(step: int) -> str:
    return f"step{step:08d}"
