"""Overhead of a trial beyond its own training: its start, its reports, and the gap between two trials.

Three trials of `tune.py --space msvp` on the digits, one after the other. For each trial:

    gap       from the last report of the previous trial to the start of this one's function (Tune, a new worker)
    start     from there to the trainer's first line in its run folder (launcher, imports, data, model)
    work      from there to the end: training, certificates, publication
    reports   CPU seconds during work of all processes of the search except the trainer's: driver, Ray, the worker
              that watches the run folder and copies checkpoints; an upper limit of their cost beside the trainer
    overhead = gap + start + reports, as a share of a trial of 2 minutes; the target is at most 0.15

`load` is the machine's load before the search: near 0 if nothing else ran.

    python -m benchmarks.bench_tune
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import psutil  # type: ignore[import-untyped]

from benchmarks.record import ROOT, record

TRIAL_SECONDS, TARGET, TRIALS, SAMPLE_SECONDS = 120.0, 0.15, 3, 1.0
TRAINER = "adv_train.py"  # in the command lines of launcher, ranks and loaders
Samples = list[tuple[float, float]]


def search(folder: Path) -> tuple[Samples, pd.DataFrame]:
    """Run a search in `folder`; return samples of (time, CPU seconds beside the trainers), and results.csv."""
    command = [sys.executable, str(ROOT / "tune.py"), "--space", "msvp", "--name", "cost", "--scheduler", "none"]
    command += ["--num-samples", str(TRIALS), "--max-concurrent", "1"]
    process = subprocess.Popen(command, cwd=folder)
    samples = list(watch(process))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    rows = pd.read_csv(folder / "runs" / "tune" / "cost" / "results.csv")
    return samples, rows.sort_values("ended").reset_index(drop=True)


def watch(process: "subprocess.Popen[bytes]") -> Iterator[tuple[float, float]]:
    """Iterate until the search ends: the time, and the CPU seconds so far of all processes but the trainers'."""
    used: dict[int, float] = {}
    while process.poll() is None:
        with suppress(psutil.Error):  # it ended meanwhile
            driver = psutil.Process(process.pid)
            note(used, [driver, *driver.children(recursive=True)])
        yield time.time(), sum(used.values())
        time.sleep(SAMPLE_SECONDS)


def note(used: dict[int, float], processes: Sequence[psutil.Process]) -> None:
    """Record the processor seconds so far of each process except the trainers'."""
    for each in processes:
        with suppress(psutil.Error):  # it ended meanwhile
            if not any(word.endswith(TRAINER) for word in each.cmdline()):
                times = each.cpu_times()
                used[each.pid] = times.user + times.system


def parts(rows: pd.DataFrame, samples: Samples) -> pd.DataFrame:
    """Return gap, start, work and reports of each trial in seconds; the first has no gap."""
    function = rows["ended"] - rows["seconds"]
    trainer = rows["run_dir"].map(lambda folder: (Path(folder) / "config.yaml").stat().st_mtime)
    times, used = np.array(samples).T
    return pd.DataFrame(
        {
            "gap": function - rows["ended"].shift(),
            "start": trainer - function,
            "work": rows["ended"] - trainer,
            "reports": np.interp(rows["ended"], times, used) - np.interp(trainer, times, used),
        }
    )


def main() -> None:
    load, begun = os.getloadavg()[0], time.time()
    with tempfile.TemporaryDirectory() as scratch:
        samples, rows = search(Path(scratch))
        whole, found = time.time() - begun, parts(rows, samples)
    gap, start, reports = (statistics.median(found[part].dropna()) for part in ("gap", "start", "reports"))
    record(
        "tune_cpu",
        {
            "load": round(load, 1),
            "trials": found.round(1).astype(object).where(found.notna(), None).to_dict("records"),
            "gap_s": round(gap, 1),
            "start_s": round(start, 1),
            "reports_cpu_s": round(reports, 1),
            "overhead_of_a_2_minute_trial": round((gap + start + reports) / TRIAL_SECONDS, 3),
            "target": TARGET,
            "whole_command_s": round(whole, 1),
        },
    )


if __name__ == "__main__":
    main()
