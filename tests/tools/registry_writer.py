"""One of several concurrent writers: `python -m tests.tools.registry_writer URI FOLDER RUNS PUBLISHED [NAME]`.

Each run logs like a training, and some runs are published. The writer does not wait for an absent server.
"""

import logging
import sys
from pathlib import Path

from tests.tools import tracking, versions

STEPS = 5


def write(uri: str, folder: Path, runs: int, published: int, name: str = "loaded") -> None:
    """Log RUNS runs of STEPS metric rows in FOLDER/run-N, and publish the first PUBLISHED of them as NAME."""
    for index in range(runs):
        run_dir = folder / f"run-{index:03d}"
        params = {"writer": folder.name, "index": index}
        tracker = tracking.begin(run_dir, uri, params, f"{folder.name}/{run_dir.name}")
        for step in range(STEPS):
            tracking.log(tracker, step, loss=1.0 / (1 + step), clean_acc=step / STEPS)
        tracker.finish()
        if index < published:
            issue(run_dir, uri, (index + 1) / (published + 1), name)
        print(run_dir.name, flush=True)


def issue(run_dir: Path, uri: str, certified: float, name: str) -> None:
    files = versions.certified(run_dir, certified)
    tags = {"trial": f"load/{run_dir.parent.name}/{run_dir.name}"}
    versions.issue(files, uri, name=name, tags=tags)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    write(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
