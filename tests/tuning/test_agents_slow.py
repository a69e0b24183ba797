"""With Ray's agents Prometheus sees a running search, Grafana has all its metrics, and a search can be a job."""

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import requires
from pathlib import Path

import pytest

from certizoo.ports import free_port
from certizoo.processes import end_group
from tests.tools.launching import ROOT
from tests.tools.tuning_runs import SHORT, begin, finish, finished
from tuning.trial import PATIENCE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    """Make a folder with the additional packages of `ray[default]`."""
    wanted = [line.partition(";")[0].strip() for line in requires("ray") or [] if 'extra == "default"' in line]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path / "agents"), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"pip does not fetch the agents of ray[default]: {done.stderr.strip()[-200:]}")
    return tmp_path / "agents"


@contextmanager
def node(agents: Path, log: Path, *flags: str) -> Iterator[str]:
    """Start a node of one CPU with its agents; yield its address."""
    address = f"127.0.0.1:{free_port()}"
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus=1"]
    command += [f"--port={address.rpartition(':')[2]}", "--node-ip-address=127.0.0.1", "--disable-usage-stats", *flags]
    own = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{agents}"
    }  # where both have a package, take the environment's
    with log.open("w") as out:
        process = subprocess.Popen(command, env=own, stdout=out, stderr=out, start_new_session=True)
    try:
        yield address
    finally:
        end_group(process, PATIENCE_SECONDS)


def test_a_search_is_seen_by_prometheus(agents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, seen = free_port(), dict[str, set[str]]()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # the loopback only
    flags = (f"--metrics-export-port={metrics}", "--include-dashboard=false")
    with node(agents, tmp_path / "ray.log", *flags) as address:
        wait_for(lambda: "ray_node_cpu_utilization" in page(metrics, "metrics"), tmp_path / "ray.log")
        monkeypatch.setenv("RAY_ADDRESS", address)
        trial = ("--space", "msvp", "--num-samples", "1", "--scheduler", "none", "--name", "seen")
        driver = begin(tmp_path, *trial, *SHORT, "train.epochs=30")
        while driver.poll() is None:
            for name, labels in re.findall(r"^(ray_\w+)\{(.*)\} ", page(metrics, "metrics"), re.MULTILINE):
                seen.setdefault(name, set()).add(labels)
            time.sleep(0.5)
        status, output = finish(driver, tmp_path, 60)
        assert status == 0, output
    asked = set(re.findall(r"\bray_\w+", (ROOT / "cluster" / "grafana.json").read_text()))
    assert asked <= seen.keys() | {"ray_node_gpus_utilization"}, "the dashboard asks for what is not served"
    of_trials = {name: labels for name, labels in seen.items() if name.startswith("ray_certizoo_")}
    assert of_trials.keys() == {name for name in asked if name.startswith("ray_certizoo_")}
    assert all('search="seen"' in one for labels in of_trials.values() for one in labels)
    assert any('eps="0.1"' in one for one in of_trials["ray_certizoo_certified_acc"])


def test_a_search_is_a_job(agents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray job submit` leaves the search to the cluster, as in cluster/README.md."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # the loopback only
    port = free_port()
    flags = (f"--dashboard-port={port}", "--dashboard-host=127.0.0.1", "--include-dashboard=true")
    with node(agents, tmp_path / "ray.log", *flags):
        wait_for(lambda: "ray_version" in page(port, "api/version"), tmp_path / "ray.log")
        search = f"{sys.executable} {ROOT}/tune.py --space msvp --num-samples 1 --scheduler none --name job"
        command = [str(Path(sys.executable).parent / "ray"), "job", "submit", f"--address=http://127.0.0.1:{port}"]
        command += ["--", "bash", "-c", f"cd {tmp_path} && {search} {' '.join(SHORT)}"]
        own = os.environ | {"PYTHONPATH": str(agents)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(finished(tmp_path / "runs" / "tune" / "job")) == 1


def page(port: int, path: str) -> str:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as answer:
        text: str = answer.read().decode()
        return text
    return ""


def wait_for(there: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 120
    while not there():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(1)
