"""Write and read a checkpoint on all ranks: to a temporary folder, read again, marked, renamed.

trainers/job/checkpoint.py describes the format.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError

from certizoo import UserError
from certizoo.files import sha256, write_whole
from trainers.engine.engine import Engine
from trainers.job.checkpoint import MARK, Saved, folder, folders, read
from trainers.ranks import PEER_GONE
from trainers.weights import states
from trainers.weights.ema import Average

PART = "part"


def save(engine: Engine, average: Average | None, run_dir: Path, saved: Saved, keep: int) -> None:
    """Write a complete checkpoint and delete all older ones but `keep`. Collective.

    Raises:
        UserError: naming the folder that could not be written; earlier checkpoints are unchanged.
    """
    world, aside = engine.world, folder(run_dir) / PART
    if world.rank == 0:
        shutil.rmtree(aside, ignore_errors=True)  # of a save that was killed
    world.barrier()
    with _one_line(folder(run_dir), aside):
        (aside / saved.tag).mkdir(parents=True, exist_ok=True)
        written = states.write(engine.share(), aside / saved.tag, world.rank)
        if average is not None and world.rank == 0:
            written.append(average.save(aside / saved.tag))
        own = {file.name: (file.stat().st_size, sha256(file)) for file in written}
    every = {name: facts for text in world.texts(json.dumps(own)) for name, facts in json.loads(text).items()}
    if world.rank == 0:
        sizes, digests = ({name: facts[i] for name, facts in every.items()} for i in (0, 1))
        with _one_line(folder(run_dir), aside):
            complete(aside / saved.tag, folder(run_dir) / saved.tag, replace(saved, files=sizes, sha256=digests))
        _prune(run_dir, saved.tag, keep)
    world.barrier()


def load(engine: Engine, average: Average | None, run_dir: Path, saved: Saved) -> None:
    """Load a checkpoint. Collective. Raises UserError naming a checkpoint that cannot be read."""
    path = folder(run_dir) / saved.tag
    verify(path, saved, engine.world.rank, engine.world.size)
    with engine.restoring() as share:
        states.read(share, path, saved.of_ranks, saved.position.step)
    if average is not None:
        average.load(path)


def verify(path: Path, saved: Saved, rank: int, size: int) -> None:
    """Read this rank's share of the files back from the disk. Raises UserError if a digest is wrong."""
    with states.one_line(path):
        for name in sorted(saved.files)[rank::size]:
            if sha256(path / name) != saved.sha256[name]:
                raise ValueError(f"{name} is damaged: it does not hold what was written")


@contextmanager
def _one_line(checkpoints: Path, aside: Path) -> Iterator[None]:
    """Turn the errors of a full disk (OSError, SafetensorError) into a UserError and delete the partial checkpoint.

    The partial checkpoint would keep the disk full. A RuntimeError comes from waiting for a rank that could not write.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if any(words in str(error) for words in PEER_GONE):
            raise  # another rank could not write, and has printed why
        shutil.rmtree(aside, ignore_errors=True)
        free = shutil.disk_usage(checkpoints).free
        raise UserError(
            f"a checkpoint could not be written to {checkpoints} ({_reason(error)}; {free / 2**20:.0f} MB free); free "
            "some space, then repeat the command with resume=auto to continue from the previous checkpoint"
        ) from None


def _reason(error: Exception) -> str:
    """Return the system's words, without the source lines and stack that torch adds."""
    return str(error).split(". Exception raised from")[0].splitlines()[0]


def complete(aside: Path, path: Path, saved: Saved) -> None:
    """Write the mark, then rename; a damaged folder of the same step is replaced."""
    write_whole(aside / MARK, saved.mark())
    if path.exists():
        os.replace(path, aside.with_name("replaced"))
    os.replace(aside, path)
    shutil.rmtree(aside.parent)


def _prune(run_dir: Path, newest: str, keep: int) -> None:
    """Delete the complete checkpoints before `newest`, the one just written, except keep - 1 of them.

    Folders that a kill left without a mark, in the middle of this, are deleted too.

    Folders of later steps are damaged ones, before which the run went on; the next save at their step replaces them.
    """
    older = [path for path in folders(run_dir) if path.name < newest]
    half_deleted, whole = [path for path in older if not (path / MARK).exists()], list(filter(_complete, older))
    for path in (*half_deleted, *whole[: max(len(whole) - (keep - 1), 0)]):
        (path / MARK).unlink(missing_ok=True)  # first: a half-deleted folder must not count as complete
        shutil.rmtree(path)


def _complete(path: Path) -> bool:
    try:
        return read(path) is not None
    except UserError:  # a mark that no run of this version wrote
        return False
