"""A long search at small scale: 200 short trials on 8 local nodes, of which three are killed and replaced meanwhile.

Nothing may be lost: every trial ends certified, with one version each in the registry. With `--kill-drivers N` the
search itself is killed as well, N times, and continued by `--resume`.

    python -m benchmarks.bench_many_trials                                           # the registry on SQLite
    MLFLOW_TRACKING_URI=postgresql+psycopg://USER:PASSWORD@HOST/DB python -m benchmarks.bench_many_trials
    python -m benchmarks.bench_many_trials --trials 1000 --kill-drivers 2            # results in many_trials_drivers_*

It reports wall seconds, the processor seconds per trial of everything that is not a trainer (driver, Ray, the MLflow
server), the driver's memory at the start and at the end, how many trials lost their worker, and how many of these had
begun to train and did so again.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import psutil  # type: ignore[import-untyped]

from benchmarks import ray_nodes
from benchmarks.bench_tune import note
from benchmarks.record import ROOT, record
from certizoo.registry import browse
from certizoo.registry.server import store
from tuning import server

MODEL, NAME = "spec_vit_digits", "many"
ADDRESS = "127.0.0.2"  # an address of the loopback that differs from each node's own
SHORT = (
    "train.epochs=1", "train.max_steps=2", "train.eval_images=4", "train.certify_images=4", "certify.images=4",
    "certify.method=lofast", "registry.champion_images=4",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--kills", type=int, default=3, help="nodes killed, evenly over the search; one joins for each")
    parser.add_argument("--kill-drivers", type=int, default=0, help="kills of the search, evenly over its trials")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        database = os.environ.pop("MLFLOW_TRACKING_URI", f"{store.SQLITE}{folder}/mlflow.db")
        with server.started(database, folder / "server.log", ADDRESS) as url, ray_nodes.cluster(options.nodes) as nodes:
            found = searched(folder, nodes, url, options)
            versions = [v.tags["trial"] for v in browse.versions(MODEL, url)]
        rows = pd.read_csv(folder / "runs" / "tune" / NAME / "results.csv")
        lost = sum("restarting" in line for line in (folder / "tune.log").read_text().splitlines())
        begun = [len(list(trial.glob("run-*.log"))) for trial in (folder / "runs/tune" / NAME / "trials").iterdir()]
    certified = int((rows["state"] == "certified").sum())
    found |= {
        "trials": options.trials,
        "nodes": options.nodes,
        "nodes_killed": options.kills,
        "drivers_killed": options.kill_drivers,
        "certified": certified,
        "workers_lost": lost,
        "versions": len(versions),
        "begun_again": sum(count > 1 for count in begun),
        "registry": database.partition(":")[0],
    }
    name = "many_trials_drivers" if options.kill_drivers else "many_trials"
    record(f"{name}_cpu" if database.startswith(store.SQLITE) else f"{name}_server_cpu", found)
    if not certified == len(versions) == len(set(versions)) == options.trials:
        twice = sorted(trial for trial, count in Counter(versions).items() if count > 1)
        said = f"{certified} certified trials and {len(versions)} versions of {options.trials} trials"
        raise SystemExit(f"{said}; more than one version: {', '.join(twice) or 'none'}")


def searched(folder: Path, nodes: ray_nodes.Nodes, url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the search and kill nodes and drivers; return seconds and the driver's memory."""
    variables = ray_nodes.environment() | {"RAY_ADDRESS": nodes.address, "MLFLOW_TRACKING_URI": url}

    def driver(*words: str) -> "subprocess.Popen[bytes]":
        with (folder / "tune.log").open("a") as log:
            command = [sys.executable, str(ROOT / "tune.py"), *words]
            return subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log)

    words = ("--space", "msvp", "--name", NAME, "--scheduler", "none", "--search", "random")
    begun, used, memory = time.monotonic(), dict[int, float](), list[float]()
    due_nodes, due_drivers = (evenly(count, options.trials) for count in (options.kills, options.kill_drivers))
    process = driver(*words, "--num-samples", str(options.trials), "--", *SHORT)
    while process.poll() is None:
        time.sleep(1)
        with suppress(psutil.Error):
            memory.append(psutil.Process(process.pid).memory_info().rss / 2**20)
        note(used, psutil.Process().children(recursive=True))
        done = len(list((folder / "runs/tune" / NAME / "trials").glob("*/run-*/certificate/certificate.json")))
        if due_nodes and done >= due_nodes[0]:
            os.killpg(nodes.processes.pop(1).pid, signal.SIGKILL)  # the head is the first
            nodes.join()
            del due_nodes[0]
        if due_drivers and done >= due_drivers[0]:
            process.kill()
            process.wait()
            process = driver("--resume", NAME)
            del due_drivers[0]
    if process.returncode:
        raise SystemExit((folder / "tune.log").read_text()[-4000:])
    seconds = time.monotonic() - begun
    early = memory[len(memory) // 10 : len(memory) // 5] or memory
    return {
        "seconds": round(seconds),
        "beside_trainers_cpu_s_a_trial": round(sum(used.values()) / options.trials, 2),
        "driver_mb_early": round(sum(early) / len(early)),
        "driver_mb_most": round(max(memory)),
    }


def evenly(count: int, trials: int) -> list[int]:
    """Return the numbers of finished trials after which something is killed `count` times."""
    return [(number + 1) * trials // (count + 1) for number in range(count)]


if __name__ == "__main__":
    main()
