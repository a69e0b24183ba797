"""Continue a run with another number of ranks: `python -m trainers.reshape runs/NAME`.

A checkpoint holds parameters, not ranks (trainers/weights/states.py), so any number of ranks can load it. Within an
epoch this would be wrong: the images still to come depend on the ranks. So the newest checkpoint at an epoch's end is
marked for any number of ranks. Later ones are moved to checkpoints/other_ranks/, and their steps are repeated.

Random streams belong to ranks. The continued run is therefore a different, equally valid one.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from certizoo import UserError
from certizoo.config.help import wants_help
from certizoo.config.schema import FilePath, checked
from certizoo.errors import one_line_errors
from certizoo.files import write_whole
from trainers.job import checkpoint
from trainers.job.checkpoint import Saved
from trainers.job.folder import held, refuse_used_folder

ASIDE = "other_ranks"


@one_line_errors
def main(argv: Sequence[str]) -> None:
    """Mark the checkpoint in place. Raises UserError if there is none."""
    if wants_help(argv):
        sys.stdout.write(f"{__doc__}")
        return
    if len(argv) != 1:
        raise UserError("no run folder given; use python -m trainers.reshape runs/NAME")
    run_dir = checked("RUN", argv[0], FilePath)
    if not checkpoint.folder(run_dir).is_dir():
        raise UserError(f"{run_dir} holds no checkpoints; give the folder of a run")
    with held(run_dir):
        refuse_used_folder(run_dir, "auto")
        reshape(run_dir)


def reshape(run_dir: Path) -> None:
    """Mark the newest checkpoint at an epoch's end for any number of ranks; move later ones aside."""
    saved = last_epoch(run_dir)
    aside = checkpoint.folder(run_dir) / ASIDE
    aside.mkdir(exist_ok=True)
    later = [path for path in checkpoint.folders(run_dir) if path.name > saved.tag]
    for path in later:
        os.replace(path, aside / path.name)
    path = checkpoint.folder(run_dir) / saved.tag
    write_whole(path / checkpoint.MARK, replace(saved, world_size=None).mark())
    sys.stdout.write(
        f"{path} can now be loaded by any number of ranks (step {saved.position.step}; {len(later)} later ones are in "
        f"{ASIDE}/); continue with resume=auto\n"
    )


def last_epoch(run_dir: Path) -> Saved:
    """Return the newest complete checkpoint that ends an epoch."""
    for path in reversed(checkpoint.folders(run_dir)):
        saved = checkpoint.read(path)
        if saved is not None and saved.position.ends_epoch:
            if saved.world_size is None:
                raise UserError(f"{path} can already be loaded by any number of ranks; continue with resume=auto")
            return saved
    raise UserError(
        f"{checkpoint.folder(run_dir)} holds no checkpoint of an epoch's end; train to one with the old number of "
        "ranks, or start anew with name=ANOTHER"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
