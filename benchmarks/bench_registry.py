"""Processor seconds of the registry's commands with 10, 2,000 and 10,000 versions of a model, on SQLite.

    find       one version by its number
    champion   one version by its alias
    list       `registry list`, the newest 50
    best       `registry list --sort certified_acc.0.1`, the best 50
    publish    a version that does not win, with its files, run and election
    every      read all versions once, as earlier code did for each of these commands

Medians of a few repetitions, after one that is not counted. All versions but one are copies of its rows.

    python -m benchmarks.bench_registry [--counts 10 2000 10000]
"""

import argparse
import gc
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.record import record
from certizoo.registry import browse
from certizoo.registry.listing import listed
from certizoo.registry.server import store
from tests.tools import versions
from tests.tools.many_versions import multiply
from tests.tools.versions import HEADLINE

NAME, SHOWN = "tiny", 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[10, 2000, 10000], help="numbers of versions, rising")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    logging.getLogger("certizoo").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        database = Path(scratch) / "mlflow.db"
        issue(database, 0.4)
        rows = {count: measured(database, count, options.repetitions) for count in options.counts}
    fewest, most = (rows[count] for count in (options.counts[0], options.counts[-1]))
    growth = {key: round(most[key] / fewest[key], 2) for key in most}
    record("registry_cpu", {"seconds": rows, "growth": growth})


def measured(database: Path, count: int, repetitions: int) -> dict[str, float]:
    uri = f"{store.SQLITE}{database}"
    multiply(database, NAME, count)
    commands: dict[str, Callable[[], object]] = {
        "find": lambda: browse.find(f"{NAME}/7", uri),
        "champion": lambda: browse.find(f"{NAME}@champion", uri),
        "list": lambda: listed(NAME, (), None, SHOWN, uri),
        "best": lambda: listed(NAME, (), HEADLINE, SHOWN, uri),
        "publish": lambda: issue(database, 0.1),
        "every": lambda: browse.versions(NAME, uri),
    }
    return {key: median(command, repetitions) for key, command in commands.items()}


def issue(database: Path, share: float) -> None:
    """Publish a version with this certified share."""
    number = len(list(database.parent.glob("run*")))
    folder = versions.certified(database.parent / f"run{number}", share)
    metrics = {HEADLINE: share}
    versions.issue(folder, f"{store.SQLITE}{database}", name=NAME, metrics=metrics, tags={"trial": f"s/{number}"})


def median(command: Callable[[], object], repetitions: int) -> float:
    seconds = []
    for _ in range(repetitions + 1):
        gc.collect()  # a collection costs as much as a publication, and comes at every second
        start = time.process_time()
        command()
        seconds.append(time.process_time() - start)
    return round(statistics.median(seconds[1:]), 4)


if __name__ == "__main__":
    main()
