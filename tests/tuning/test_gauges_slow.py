"""Figures of a running search: Ray's agent serves them to Prometheus, and the dashboard asks for these alone."""

import os
import re
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from importlib.metadata import requires
from pathlib import Path

import pytest

from certizoo.processes import end_group
from tests.tools.launching import ROOT
from tests.tools.tuning_runs import SHORT, begin, finish
from tuning.trial import PATIENCE_SECONDS, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    """A folder with what `ray[default]` has beyond Ray itself."""
    wanted = [line.partition(";")[0].strip() for line in requires("ray") or [] if 'extra == "default"' in line]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path / "agents"), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"pip does not fetch the agents of ray[default]: {done.stderr.strip()[-200:]}")
    return tmp_path / "agents"


def test_a_search_is_seen_by_prometheus(agents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, metrics = free_port(), free_port()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # the loopback only
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus=1"]
    command += [f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
    command += [f"--metrics-export-port={metrics}", "--disable-usage-stats"]
    seen: dict[str, set[str]] = {}
    with (tmp_path / "ray.log").open("w") as log:
        # Behind what is installed: of packages that both have, the environment's.
        own = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{agents}"}
        node = subprocess.Popen(command, env=own, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(metrics, "ray_node_cpu_utilization", tmp_path)
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        trial = ("--space", "msvp", "--num-samples", "1", "--scheduler", "none", "--name", "seen")
        driver = begin(tmp_path, *trial, *SHORT, "train.epochs=30")
        while driver.poll() is None:
            for name, labels in re.findall(r"^(ray_\w+)\{(.*)\} ", scraped(metrics), re.MULTILINE):
                seen.setdefault(name, set()).add(labels)
            time.sleep(0.5)
        status, output = finish(driver, tmp_path, 60)
        assert status == 0, output
    finally:
        end_group(node, PATIENCE_SECONDS)
    asked = set(re.findall(r"\bray_\w+", (ROOT / "cluster" / "grafana.json").read_text()))
    assert asked <= seen.keys() | {"ray_node_gpus_utilization"}, "the dashboard asks for what is not served"
    of_trials = {name: labels for name, labels in seen.items() if name.startswith("ray_certizoo_")}
    assert of_trials.keys() == {name for name in asked if name.startswith("ray_certizoo_")}
    assert all('search="seen"' in one for labels in of_trials.values() for one in labels)
    assert any('eps="0.1"' in one for one in of_trials["ray_certizoo_certified_acc"])


def scraped(port: int) -> str:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text: str = answer.read().decode()
        return text
    return ""


def wait_for(port: int, name: str, folder: Path) -> None:
    deadline = time.monotonic() + 120
    while name not in scraped(port):
        assert time.monotonic() < deadline, (folder / "ray.log").read_text()
        time.sleep(1)
