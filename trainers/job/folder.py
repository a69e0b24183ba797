"""The run folder: who may write to it, and what it may contain.

A resumed run may use a folder that came from elsewhere. Everything read there is checked (checkpoint.py,
trainers/weights/states.py). Nothing is written through a link, which could lead to any file of the user.
"""

import os
from contextlib import AbstractContextManager
from pathlib import Path

from certizoo import UserError
from certizoo.locks import HOLDER, LOCK, sole_writer
from trainers.job import checkpoint
from trainers.job.job import Job
from trainers.settings import require


def held(run_dir: Path) -> AbstractContextManager[None]:
    """Lock the folder for one writer. Raises UserError at once if there is another."""
    return sole_writer(run_dir, "a training", "start another one with name=ANOTHER")


def refuse_used_folder(run_dir: Path, resume: str | None) -> None:
    """Raise UserError for a folder that is not empty, unless the run resumes and the folder contains no links."""
    require(resume in (None, "auto"), f"resume={resume} does not exist; use resume=auto")
    content = {path.name for path in run_dir.iterdir()} - {LOCK, HOLDER} if run_dir.is_dir() else set()
    require(
        resume == "auto" or not content,
        f"{run_dir} holds an earlier run; continue it with resume=auto, or start another with name=ANOTHER",
    )
    for folder, subfolders, files in os.walk(run_dir):
        for name in (*subfolders, *files):
            path = Path(folder, name)
            require(
                not path.is_symlink(),
                f"{path} is a link, and a run does not write through links; replace it by its target",
            )


def refuse_changed(job: Job) -> None:
    """Raise UserError if another run has written to the folder since the job was prepared."""
    resume = job.config["resume"]
    refuse_used_folder(job.run_dir, resume)
    if resume and checkpoint.to_resume(job.run_dir) != job.saved:
        raise UserError(f"{job.run_dir} was changed while this run started; repeat the command")
