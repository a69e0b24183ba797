"""Each rank's log in run_dir/logs/rankN.log: events with times, and stack traces of a crash."""

import faulthandler
import logging
from pathlib import Path

from trainers import ranks

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def path_of(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank{rank}.log"


def to_files(run_dir: Path) -> None:
    """Log INFO and above to this rank's file; warnings also to the terminal on the first rank of a machine."""
    path = path_of(run_dir, ranks.rank())
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = logging.FileHandler(path)
    kept.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    for handler in root.handlers:
        handler.setLevel(logging.WARNING if ranks.local_rank() == 0 else logging.CRITICAL)
    root.addHandler(kept)
    for folder in ("trainers", "certizoo", "zoo"):
        logging.getLogger(folder).setLevel(logging.INFO)
    logging.raiseExceptions = False  # a log that cannot be written must not print a traceback for every line
    faulthandler.enable(path.open("a"))
