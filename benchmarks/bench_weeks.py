"""Waiting in weeks of work on a cluster, before and after it was made cheap, in one run.

The same probes run in a checkout of an earlier commit and in this tree, with the same shards and copies of one
registry. All are processor seconds, except the megabytes read:

    resume     to the first batch in the middle of an epoch (one rank, no loaders)
    certify_resume   to the first batch of a certification of 1,000 images whose first half is done
    split      to find one test shard in a manifest of ImageNet's size, 1,331 shards of 1,000 images
    find, champion, list, publish   of 2,000 versions: by number, by alias, `registry list`, one more version
    board      one refresh of a search's table of 1,000 trials
    zoo        `python -m zoo`

The default commit precedes all these changes.

    python -m benchmarks.bench_weeks [--before cfd0639e^] [--shards 60] [--versions 2000]
"""

import argparse
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAME, BATCH, TRIALS, CERTIFIED, SPLIT = "tiny", 64, 1000, 1000, 1331
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="cfd0639e^", metavar="COMMIT")
    parser.add_argument("--shards", type=int, default=60, help="of 1,000 images of 100 kB")
    parser.add_argument("--versions", type=int, default=2000)
    parser.add_argument("--probe", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        sys.stdout.write(json.dumps(probed(options.probe)))
        return
    from benchmarks import bench_registry, bench_resume
    from benchmarks.record import record
    from tests.tools.many_versions import multiply

    with tempfile.TemporaryDirectory() as scratch, checkout(options.before, Path(scratch)) as earlier:
        folder = Path(scratch)
        for name in ("shards", "split"):
            (folder / name).mkdir()
        kilobytes = bench_resume.make(folder / "shards", options.shards, 331)
        bench_resume.make(folder / "split", SPLIT, 8)
        bench_registry.issue(folder / "mlflow.db", 0.4)
        multiply(folder / "mlflow.db", NAME, options.versions)
        before, after = run(earlier, folder, "before"), run(ROOT, folder, "after")
    ratios = {key: round(before[key] / max(after[key], 1e-9), 1) for key in after}
    about = {"kilobytes": kilobytes, "shards": options.shards, "versions": options.versions, "trials": TRIALS}
    record("weeks_cpu", {"before_commit": options.before, **about, "before": before, "after": after, "ratio": ratios})


@contextmanager
def checkout(commit: str, scratch: Path) -> Iterator[Path]:
    """Yield a work tree of the commit."""
    tree = scratch / "earlier"
    subprocess.run(["git", "worktree", "add", "--detach", "--quiet", tree, commit], cwd=ROOT, check=True)
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def run(tree: Path, folder: Path, name: str) -> Figures:
    """Run the probes with the packages of a tree and a copy of the registry."""
    shutil.copy(folder / "mlflow.db", folder / f"{name}.db")
    env = os.environ | {"PYTHONPATH": str(tree), "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/{name}.db"}
    command = [sys.executable, str(Path(__file__).resolve()), "--probe", str(folder)]
    done = subprocess.run(command, cwd=tree, env=env, check=True, stdout=subprocess.PIPE, text=True)
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


# the probes, which use only what both trees have ----------------------------------------------------------------------


def probed(folder: Path) -> Figures:
    found = of_data(folder) | of_registry(folder) | of_board()
    begun = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-m", "zoo"], check=True, stdout=subprocess.DEVNULL)
    found["zoo"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begun
    return {key: round(value, 4) for key, value in found.items()}


def of_data(folder: Path) -> Figures:
    from certify.rows.images import ImageList
    from certizoo import shards

    data = shards.DataConfig("big", str(folder / "shards"), "big-train-*.tar", "big-train-*.tar", 1000, 224)
    train = shards.find(data, "train")
    steps = shards.steps_per_epoch(train, BATCH)

    def resume() -> None:
        loader = shards.train_loader(train, data, batch_size=BATCH, epoch=0, seed=0, skip_batches=steps // 2)
        next(iter(loader))

    nobody: Any = (None,) * CERTIFIED
    images = ImageList(train, data, 0, BATCH, nobody, "")
    before = read_bytes()
    found = {"resume": seconds(resume)}
    found["resume_megabytes"] = (read_bytes() - before) / 1e6
    found["certify_resume"] = seconds(lambda: next(images.batches(CERTIFIED // 2)))
    split = replace(data, root=str(folder / "split"), test="big-train-000000.tar")
    return found | {"split": seconds(lambda: shards.find(split, "test"))}


def of_registry(folder: Path) -> Figures:
    from certizoo.registry import __main__ as registry
    from certizoo.registry import browse
    from tests.tools import versions

    def publish(number: int) -> None:
        versions.issue(
            versions.certified(folder / f"more{os.getpid()}-{number}", 0.1), None, tags={"trial": str(number)}
        )

    browse.find(f"{NAME}/7")  # connects
    found = {"find": seconds(lambda: browse.find(f"{NAME}/7"))}
    found["champion"] = seconds(lambda: browse.find(f"{NAME}@champion"))
    with redirect_stdout(io.StringIO()):
        found["list"] = seconds(lambda: registry.main(["list", NAME]))
    publish(0)  # imports
    return found | {"publish": seconds(lambda: publish(1))}


def of_board() -> Figures:
    from rich.console import Console

    from tuning import spaces
    from tuning.live import Board, Line

    space = spaces.load("msvp")
    board, console = Board(space, ["clean_acc"], TRIALS, 12), Console(file=io.StringIO(), width=200)
    values = dict.fromkeys(space.parameters, 0.1)
    board.lines = {f"t_{n:04}": Line("running", values, {"clean_acc": n / TRIALS}) for n in range(TRIALS)}
    return {"board": seconds(lambda: console.print(board.table()))}


def seconds(work: Callable[[], object]) -> float:
    """Return the processor seconds of this process for the work."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def read_bytes() -> float:
    """Return the bytes that this process has read by system calls."""
    return float(Path("/proc/self/io").read_text().split()[1])


if __name__ == "__main__":
    main()
