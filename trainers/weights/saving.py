"""Writing and reading a checkpoint, all ranks together: to a temporary folder, read again, marked, renamed
(trainers/job/checkpoint.py)."""

import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from certizoo import UserError
from certizoo.files import write_whole
from trainers.engine.engine import Engine
from trainers.job.checkpoint import MARK, Saved, folder, folders
from trainers.ranks import PEER_GONE
from trainers.weights.ema import Average

PART = "part"


def save(engine: Engine, average: Average | None, run_dir: Path, saved: Saved, keep: int) -> None:
    """Collective. After it returns, on every rank, the checkpoint is complete and older ones but `keep` are gone.

    Raises UserError naming the folder where it could not be written; earlier checkpoints are as they were.
    """
    world, aside = engine.world, folder(run_dir) / PART
    if world.rank == 0:
        shutil.rmtree(aside, ignore_errors=True)  # of a save that was killed
    world.barrier()
    with _one_line(folder(run_dir), aside):
        engine.save(aside, saved.tag)  # ends with a barrier: all ranks have written
        if average is not None and world.rank == 0:
            average.save(aside / saved.tag)
        world.barrier()
        verify(aside / saved.tag, world.rank, world.size)
    world.barrier()
    if world.rank == 0:
        with _one_line(folder(run_dir), aside):
            complete(aside / saved.tag, folder(run_dir) / saved.tag, saved)
        _prune(run_dir, keep)
    world.barrier()


def verify(path: Path, rank: int, size: int) -> None:
    """Read this rank's share of the files as they are on the disk. Raises OSError where a checksum is wrong."""
    for file in sorted(path.rglob("*.pt"))[rank::size]:
        with file.open("rb") as written:
            os.fsync(written.fileno())
        with zipfile.ZipFile(file) as archive:  # torch.save writes a zip file with a CRC-32 of each tensor
            broken = archive.testzip()
        if broken is not None:
            raise OSError(f"{file.name} does not hold what was written")


def load(engine: Engine, average: Average | None, run_dir: Path, saved: Saved) -> None:
    """Collective. Raises UserError naming a checkpoint that cannot be read."""
    path = folder(run_dir) / saved.tag
    try:
        verify(path, engine.world.rank, engine.world.size)
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is damaged ({error}); delete it and resume from the one before") from None
    engine.load(folder(run_dir), saved.tag, any_ranks=saved.world_size is None)
    if (path / "zero").is_dir():
        _restore_buffers(engine, path / "zero")
    if average is not None:
        average.load(path)


@torch.no_grad()
def _restore_buffers(engine: Engine, parts: Path) -> None:
    """Of a universal checkpoint: it has them, but DeepSpeed loads weights and optimiser only."""
    for name in engine.module.state_dict().keys() & {name for name, _ in engine.module.named_buffers()}:
        value = torch.load(parts / f"model.{name}" / "fp32.pt", weights_only=True)["param"]
        engine.module.get_buffer(name).copy_(value)


@contextmanager
def _one_line(checkpoints: Path, aside: Path) -> Iterator[None]:
    """What a full disk raises here (OSError from Python, RuntimeError from torch's writer) becomes a UserError, and
    what was written aside is deleted: it would keep the disk full."""
    try:
        yield
    except (OSError, RuntimeError, zipfile.BadZipFile) as error:
        if any(words in str(error) for words in PEER_GONE):
            raise  # another rank could not write, and has printed why
        shutil.rmtree(aside, ignore_errors=True)
        free = shutil.disk_usage(checkpoints).free
        raise UserError(
            f"a checkpoint could not be written to {checkpoints} ({_reason(error)}; {free / 2**20:.0f} MB free); make "
            "room, then go on from the checkpoint before by the same command and resume=auto"
        ) from None


def _reason(error: Exception) -> str:
    """The system's words, without the source lines and stack that torch adds."""
    return str(error).split(". Exception raised from")[0].splitlines()[0]


def complete(aside: Path, path: Path, saved: Saved) -> None:
    """Mark, then rename; a damaged folder of the same step makes room."""
    files = {str(file.relative_to(aside)): file.stat().st_size for file in aside.rglob("*") if file.is_file()}
    record = {key: value for key, value in asdict(saved).items() if key != "tag"} | {"files": files}
    write_whole(aside / MARK, json.dumps(record, indent=1))
    if path.exists():
        os.replace(path, aside.with_name("replaced"))
    os.replace(aside, path)
    shutil.rmtree(aside.parent)


def _prune(run_dir: Path, keep: int) -> None:
    whole = [path for path in folders(run_dir) if (path / MARK).is_file()]
    for path in whole[:-keep]:
        (path / MARK).unlink()  # first: a folder half deleted must not count as complete
        shutil.rmtree(path)
