"""What a trial costs beyond its own training: its start, and what lies between two trials.

Three trials of `tune.py --space msvp` on the digits, one after the other. Of a trial:

    gap       from the last report of the trial before to the start of this one's function (Tune, a new worker)
    start     from there to the trainer's first line in its run folder (launcher, imports, data, model)
    work      from there to the end: training, certificates, publication
    overhead = gap + start, as a share of a trial of 2 minutes; at most 0.15 is wanted

The reports themselves cost a trial nothing but a neighbour's share of the cores: another process watches its files.

    python -m benchmarks.bench_tune
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd

from benchmarks.record import record

TRIAL_SECONDS, TARGET, TRIALS = 120.0, 0.15, 3
ROOT = Path(__file__).resolve().parents[1]


def search(folder: Path) -> tuple[float, pd.DataFrame]:
    """(seconds of the whole command, results.csv) of a search in `folder`."""
    command = [sys.executable, str(ROOT / "tune.py"), "--space", "msvp", "--name", "cost", "--scheduler", "none"]
    command += ["--num-samples", str(TRIALS), "--max-concurrent", "1"]
    begun = time.time()
    subprocess.run(command, cwd=folder, check=True)
    rows = pd.read_csv(folder / "runs" / "tune" / "cost" / "results.csv")
    return time.time() - begun, rows.sort_values("ended").reset_index(drop=True)


def parts(rows: pd.DataFrame) -> pd.DataFrame:
    """gap, start and work of each trial in seconds; the first has no gap."""
    function = rows["ended"] - rows["seconds"]
    trainer = rows["run_dir"].map(lambda folder: (Path(folder) / "config.yaml").stat().st_mtime)
    return pd.DataFrame(
        {"gap": function - rows["ended"].shift(), "start": trainer - function, "work": rows["ended"] - trainer}
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        whole, rows = search(Path(scratch))
        found = parts(rows)
    gap, start = (statistics.median(found[part].dropna()) for part in ("gap", "start"))
    record(
        "tune",
        {
            "trials": found.round(1).to_dict("records"),
            "gap_s": round(gap, 1),
            "start_s": round(start, 1),
            "overhead_of_a_2_minute_trial": round((gap + start) / TRIAL_SECONDS, 3),
            "target": TARGET,
            "whole_command_s": round(whole, 1),
        },
    )


if __name__ == "__main__":
    main()
