"""Each rank's log in run_dir/logs/rankN.log: what happened and when, and the stacks of a crash."""

import faulthandler
import logging
from pathlib import Path

from trainers import ranks

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def path_of(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank{rank}.log"


def to_files(run_dir: Path) -> None:
    """From now on: INFO and above into this rank's file; warnings on the terminal from the first rank of a machine."""
    path = path_of(run_dir, ranks.rank())
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = logging.FileHandler(path)
    kept.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    for handler in root.handlers:
        handler.setLevel(logging.WARNING if ranks.local_rank() == 0 else logging.CRITICAL)
    root.addHandler(kept)
    for folder in ("trainers", "shards", "registry", "zoo", "attacks"):
        logging.getLogger(folder).setLevel(logging.INFO)
    logging.raiseExceptions = False  # a log that cannot be written is no reason for a traceback a line
    faulthandler.enable(path.open("a"))
