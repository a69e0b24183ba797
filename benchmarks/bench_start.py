"""Time until a training begins, medians of a few starts; processor seconds unless stated otherwise.

    rank       the imports of one rank, in the order of trainers/entry.py
    launcher   DeepSpeed's two processes around a rank that does nothing: only DeepSpeed's own imports
    refusal    wall time from the command to the error line about a missing data set

Bytecode is written and read as Python does by default; one start before the others writes it.

    python -m benchmarks.bench_start [--starts 5]
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import timing
from benchmarks.record import ROOT, record
from certizoo.errors import EXIT_USER_ERROR

DEEPSPEED = (sys.executable, str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "1")
IMPORTS = """
from certizoo.imports import large_imports
import trainers.entry
with large_imports():
    from trainers.job.prepare import prepare
    from trainers.engine import engine
    from trainers.steps import loop
    from trainers.weights import handover
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5)
    starts = parser.parse_args().starts
    with tempfile.TemporaryDirectory() as folder:
        nothing = Path(folder) / "nothing.py"
        nothing.touch()
        trainer = [str(ROOT / "trainers" / "adv_train.py"), "+model=spec_vit_b", "data.root=nowhere"]
        seconds = [
            {
                "rank": used([sys.executable, "-c", IMPORTS], folder),
                "launcher": used([*DEEPSPEED, str(nothing)], folder) - used([sys.executable, str(nothing)], folder),
                "refusal": waited([*DEEPSPEED, *trainer], folder),
            }
            for _ in range(starts + 1)
        ][1:]
    record("start_cpu", {"starts": starts} | {key: statistics.median(s[key] for s in seconds) for key in seconds[0]})


def used(command: Sequence[str], folder: str) -> float:
    """Return the processor seconds of the command and all processes that it starts and waits for."""
    clock = partial(timing.processor_seconds, resource.RUSAGE_CHILDREN)
    return timing.timed(partial(run, command, folder, 0), clock)[1]


def waited(command: Sequence[str], folder: str) -> float:
    return timing.timed(partial(run, command, folder, EXIT_USER_ERROR), time.perf_counter)[1]


def run(command: Sequence[str], folder: str, status: int) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = kept | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != status:
        sys.exit(f"{' '.join(command)} ended with {done.returncode} instead of {status}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
