"""A run goes on with another number of ranks:  python -m trainers.reshape runs/NAME

The newest checkpoint of an epoch's end becomes a universal one (https://arxiv.org/abs/2406.18820), which any number of
ranks can load; DeepSpeed's own tool converts it. Inside an epoch it would be wrong: which images are still to come
depends on the ranks. The original and later ones are put aside (checkpoints/other_ranks/); their steps are made again.

Random streams belong to ranks, so the run is then another one than it would have been, and as good.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from certizoo import UserError
from certizoo.errors import one_line_errors
from trainers.job import checkpoint
from trainers.job.checkpoint import Saved
from trainers.weights import saving
from trainers.weights.saving import PART

TOOL = "deepspeed.checkpoint.ds_to_universal"
ASIDE, AVERAGE = "other_ranks", "ema.safetensors"


@one_line_errors
def main(argv: Sequence[str]) -> None:
    """Convert in place. Raises UserError where there is nothing to convert."""
    if len(argv) != 1:
        raise UserError("which run? python -m trainers.reshape runs/NAME")
    run_dir = Path(argv[0])
    saved = last_epoch(run_dir)
    aside = checkpoint.folder(run_dir) / ASIDE
    aside.mkdir(exist_ok=True)
    later = [path for path in checkpoint.folders(run_dir) if path.name > saved.tag]
    convert(run_dir, saved)
    for path in later:
        os.replace(path, aside / path.name)
    sys.stdout.write(
        f"{checkpoint.folder(run_dir) / saved.tag} can be loaded by any number of ranks now (step {saved.position.step}"
        f"; the original and {len(later)} later ones are in {ASIDE}/): go on with resume=auto\n"
    )


def last_epoch(run_dir: Path) -> Saved:
    """The newest complete checkpoint that ends an epoch."""
    for path in reversed(checkpoint.folders(run_dir)):
        saved = checkpoint.read(path)
        if saved is not None and saved.position.ends_epoch:
            if saved.world_size is None:
                raise UserError(f"{path} can be loaded by any number of ranks already; go on with resume=auto")
            return saved
    raise UserError(
        f"{checkpoint.folder(run_dir)} holds no checkpoint of an epoch's end; go on to one with as many ranks as "
        "before, or start anew with name=ANOTHER"
    )


def convert(run_dir: Path, saved: Saved) -> None:
    """The checkpoint's folder is replaced by its universal form; the original is put aside."""
    path, aside = checkpoint.folder(run_dir) / saved.tag, checkpoint.folder(run_dir) / PART / saved.tag
    shutil.rmtree(aside.parent, ignore_errors=True)
    if any(path.glob("*optim_states.pt")):
        to_universal(path, aside)
    else:
        # At ZeRO 0 nothing is cut over ranks. Not its mark, which lists all files and comes anew, with another size.
        shutil.copytree(path, aside, ignore=shutil.ignore_patterns(checkpoint.MARK))
    if (path / AVERAGE).exists():
        shutil.copyfile(path / AVERAGE, aside / AVERAGE)
    saving.verify(aside, 0, 1)
    os.replace(path, checkpoint.folder(run_dir) / ASIDE / saved.tag)
    saving.complete(aside, path, replace(saved, world_size=None))


def to_universal(path: Path, aside: Path) -> None:
    """By DeepSpeed's tool, which at stage 3 leaves out buffers: batch statistics, vectors of power iterations."""
    if any(path.glob("zero_pp_rank_*_model_states.pt")):
        raise UserError(f"{path} is of ZeRO 3, which cannot be converted; go on with as many ranks as before")
    command = [sys.executable, "-m", TOOL, "--input_folder", str(path), "--output_folder", str(aside)]
    done = subprocess.run([*command, "--inject_missing_state"], text=True, capture_output=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"DeepSpeed could not convert {path}: {reason}; go on with as many ranks as before")


if __name__ == "__main__":
    main(sys.argv[1:])
