"""One of several concurrent writers: `python -m tests.tools.registry_writer URI FOLDER RUNS PUBLISHED`.

Each run logs like a training, and some runs are published. The writer does not wait for an absent server.
"""

import logging
import sys
from pathlib import Path

from certizoo.registry.track import Tracker
from tests.tools import versions

STEPS = 5


def write(uri: str, folder: Path, runs: int, published: int) -> None:
    """Log RUNS runs of STEPS metric rows in FOLDER/run-N, and publish the first PUBLISHED of them."""
    for index in range(runs):
        run_dir = folder / f"run-{index:03d}"
        tracker = Tracker(run_dir, uri, flush_seconds=0)
        run_id = tracker.start("load", f"{folder.name}/{run_dir.name}", {"writer": folder.name, "index": index})
        for step in range(STEPS):
            tracker.log({"loss": 1.0 / (1 + step), "clean_acc": step / STEPS}, step)
        tracker.finish()
        if index < published:
            issue(run_dir, uri, tracker.run_id or run_id, certified=(index + 1) / (published + 1))
        print(run_dir.name, flush=True)


def issue(run_dir: Path, uri: str, run_id: str, certified: float) -> None:
    files = versions.certified(run_dir, certified)
    tags = {"trial": f"load/{run_dir.parent.name}/{run_dir.name}"}
    versions.issue(files, uri, name="loaded", tags=tags, run_id=run_id, experiment="load")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    write(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
