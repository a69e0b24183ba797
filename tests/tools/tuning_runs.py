"""Searches small enough for tests, started like a user's: tune.py in its own process, in an empty folder.

Also two nodes of a real Ray.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from certizoo.processes import end_group
from tests.tools.launching import ROOT, environment
from tuning import server
from tuning.trial import PATIENCE_SECONDS

ADDRESS = "127.0.0.2"  # tune.py takes this loopback address for another machine, so that nodes share the server

# A trial of a few seconds of work: a certificate of 40 images, and 4 epochs of digits.
SMALL = ("certify.images=40", "certify.method=lofast", "train.eval_images=80", "registry.champion_images=40")
SHORT = ("--", "train.epochs=4", *SMALL)


def begin(cwd: Path, *arguments: str, uri: str | None = None, path: Path = ROOT) -> "subprocess.Popen[str]":
    """Start `python tune.py ARGUMENTS` in `cwd`, with the registry at `uri` and the output in cwd/tune.log.

    Modules in `path` come first.
    """
    env = {key: value for key, value in environment().items() if key not in ("LOCAL_SIZE", "MLFLOW_TRACKING_URI")}
    env |= {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}", "CERTIZOO_CACHE": str(cwd / "cache")}
    env |= {"MLFLOW_TRACKING_URI": uri} if uri else {}
    with (cwd / "tune.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "tune.py"), *arguments], cwd=cwd, env=env, stdout=log, stderr=log, text=True
        )


def finish(process: "subprocess.Popen[str]", cwd: Path, seconds: float) -> tuple[int, str]:
    """Return (exit status, output)."""
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(60)
        raise AssertionError(f"still running after {seconds} s:\n{(cwd / 'tune.log').read_text()}") from None
    return status, (cwd / "tune.log").read_text()


def runs(search: Path) -> dict[str, list[str]]:
    """Return {trial: names of its run folders}."""
    folders = sorted(path for path in (search / "trials").iterdir() if path.is_dir())
    return {path.name: sorted(run.name for run in path.glob("run-*") if run.is_dir()) for path in folders}


def first_step(run_dir: Path) -> int:
    """Return the step at which the trainer reported to resume, or 0 where it began."""
    said = [line for line in run_dir.with_suffix(".log").read_text().splitlines() if line.startswith("resuming ")]
    return int(said[-1].rsplit(" ", 1)[-1]) if said else 0


def finished(search: Path) -> list[str]:
    """Return the trials whose last run has its certificate."""
    return [
        trial
        for trial, names in runs(search).items()
        if names and (search / "trials" / trial / names[-1] / "certificate" / "certificate.json").is_file()
    ]


def certified(run_dir: Path, eps: str) -> float:
    certificate = json.loads((run_dir / "certificate" / "certificate.json").read_text())
    return float(certificate["accuracy"][eps]["certified"])


def alive(words: str) -> list[int]:
    """Return the processes whose command line contains `words`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if words.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@contextmanager
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """Start a cluster of one CPU each that RAY_ADDRESS names; yield the node that is not its head."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # the loopback only
    monkeypatch.setenv("RAY_worker_niceness", "0")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        other = cluster.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster, other
    finally:
        cluster.shutdown()


@contextmanager
def node_apart(cluster: Any, hidden: Path) -> Iterator[None]:
    """Start a node of one more CPU with its own disk in place of `hidden`; kill it on leaving."""
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("needs root and unshare, to give a node a disk of its own")
    hidden.mkdir(parents=True, exist_ok=True)
    start = f"mount -t tmpfs none {hidden} && exec {Path(sys.executable).parent}/ray start --num-cpus=1 --block"
    command = ["unshare", "-m", "sh", "-c", f"{start} --address={cluster.address} --disable-usage-stats"]
    node = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        time.sleep(15)  # wait until it has joined
        yield
    finally:
        end_group(node, PATIENCE_SECONDS)


@contextmanager
def shared_server(folder: Path) -> Iterator[str]:
    """Start an MLflow server for other machines, which passes files through it."""
    with server.started(f"sqlite:///{folder}/mlflow.db", folder / "server.log", ADDRESS) as url:
        yield url
