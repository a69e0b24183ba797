"""A real `mlflow server`, started by `certizoo registry ui`, over a store that runs write to directly; and its end."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from certizoo.ports import free_port
from certizoo.registry import browse
from certizoo.registry.server import store, ui
from certizoo.registry.tracking import runs
from certizoo.registry.versions import publish as publishing
from certizoo.registry.versions.publish import Published
from tests.tools import versions
from tests.tools.launching import wait_for
from tests.tools.tracking import begin, log


@contextmanager
def handled(number: signal.Signals, how: Any = signal.default_int_handler) -> Iterator[None]:
    """Let processes started here receive Ctrl-C as at a terminal.

    A background job of a script (`make test &`) ignores Ctrl-C, and its children inherit that.
    """
    before = signal.signal(number, how)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def registry_ui(folder: Path, port: int) -> Iterator[str]:
    """Run the server on the store of `folder`, end it by Ctrl-C, and check that none of its processes is left."""
    environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    environment["PYTHONPATH"] = str(Path(store.__file__).parents[2])
    arguments = [sys.executable, "-m", "certizoo.registry", "ui", "--port", str(port)]
    with (folder / "server.log").open("w") as log, handled(signal.SIGINT):
        server = subprocess.Popen(arguments, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        url = f"http://127.0.0.1:{port}"
        assert server.stdout is not None
        assert server.stdout.readline().startswith(f"{url}/#/models")
        wait_for(f"{url}/health", server)
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        try:
            assert server.wait(100) == 0
        finally:
            server.terminate()  # otherwise a failure would leave it running
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def train(run_dir: Path, uri: str) -> Published:
    """Track a training and publish its hand-over."""
    tracker = begin(run_dir, uri, {"epochs": 3}, run_dir.name)
    log(tracker, 0, loss=1.0)
    tracker.finish()
    return versions.issue(run_dir / "handover", uri)


@pytest.mark.slow  # the parts without a server: test_track.py, test_publish.py
def test_direct_server_and_later_runs_meet_in_one_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    database, port = f"sqlite:///{tmp_path}/mlflow.db", free_port()
    url = f"http://127.0.0.1:{port}"
    folders = {name: versions.certified(tmp_path / "runs" / name) for name in ("direct", "later", "live")}

    assert train(tmp_path / "runs" / "direct", database).version
    assert train(tmp_path / "runs" / "later", url).version is None, "the server is not up yet"

    with registry_ui(tmp_path, port):
        published = publishing.sync(tmp_path / "runs" / "later", url)
        assert published is not None
        assert (published.version, published.champion) == ("2", False)
        assert not runs.waiting(tmp_path / "runs" / "later")
        assert train(tmp_path / "runs" / "live", url).version == "3"
        assert_all_there(url, folders, tmp_path / "cache-server", monkeypatch)
        assert_a_name_that_is_not_its_own_is_said(port, monkeypatch)
        # the pages of the browser fetch through these routes:
        for version in browse.versions("tiny", url):
            got = f"{url}/get-artifact?path=handover/certificate.json&run_uuid={version.run_id}"
            with urllib.request.urlopen(got, timeout=10) as answer:
                assert json.loads(answer.read())["run"] in folders
    assert_all_there(database, folders, tmp_path / "cache-direct", monkeypatch)


def assert_a_name_that_is_not_its_own_is_said(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow rejects such requests, which means neither an absent server nor a wrong password."""
    asked = socket.getaddrinfo

    def here(host: str, *how: Any, **more: Any) -> Any:
        return asked("127.0.0.1" if host == "registry.example" else host, *how, **more)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", here)
        with pytest.raises(store.Away, match=r"not to that name.*MLFLOW_SERVER_ALLOWED_HOSTS") as caught:
            browse.versions("tiny", f"http://registry.example:{port}")
    assert "does not answer" not in str(caught.value)
    assert "\n" not in str(caught.value)


def assert_all_there(uri: str, folders: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CERTIZOO_CACHE", str(cache))
    found = browse.versions("tiny", uri)
    assert [v.version for v in found] == [str(n) for n in range(len(folders), 0, -1)]
    for version, name in zip(reversed(found), folders, strict=True):
        got = browse.download(version.uri, uri)
        for file in ("model.safetensors", "certificate.json"):
            assert (got / file).read_bytes() == (folders[name] / file).read_bytes()


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environment = os.environ | {"PYTHONPATH": str(Path(store.__file__).parents[2])}
        arguments = [sys.executable, "-m", "certizoo.registry", "ui", "--port", port]
        done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "choose another --port" in done.stderr


# A stand-in for the server: it reports that it runs, and ends slowly.
CHILD = """
import signal, sys, time

def end(*_):
    print("ending", flush=True)
    time.sleep(2)
    sys.exit()

signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(600)
"""

# Runs the child; a signal may come at any time after its start.
STRUCK = """
import os, signal, subprocess, sys
from certizoo.registry.server import ui

start = subprocess.Popen

def started(*how, **more):
    process = start(*how, **more)
    print(process.pid, file=sys.stderr, flush=True)  # stdout is the child's
    if sys.argv[2:]:
        os.kill(os.getpid(), int(sys.argv[2]))
    return process

subprocess.Popen = started
sys.exit(ui.run_group([sys.executable, "-c", sys.argv[1]], {}))
"""


@contextmanager
def group(*at_start: signal.Signals) -> Iterator["subprocess.Popen[str]"]:
    """Start a process that runs the child's group, to be ended inside; check that nothing of the group is left."""
    arguments = [sys.executable, "-c", STRUCK, CHILD, *(str(int(number)) for number in at_start)]
    environment = os.environ | {"PYTHONPATH": str(Path(store.__file__).parents[2])}
    runner = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert runner.stderr is not None
    leader = int(runner.stderr.readline())
    try:
        yield runner
        with pytest.raises(ProcessLookupError):
            os.killpg(leader, 0)
    finally:
        runner.kill()
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
        runner.communicate()


def wait_until(word: str, runner: "subprocess.Popen[str]") -> None:
    assert runner.stdout is not None
    assert runner.stdout.readline() == f"{word}\n"


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGHUP, 128 + signal.SIGHUP)],
)
def test_a_signal_during_the_start_leaves_nothing(number: signal.Signals, status: int) -> None:
    with handled(number, signal.SIG_DFL), group(number) as runner:
        assert runner.wait(30) == status


def test_ctrl_c_in_haste_leaves_nothing() -> None:
    with handled(signal.SIGINT), group() as runner:
        wait_until("ready", runner)
        runner.send_signal(signal.SIGINT)
        wait_until("ending", runner)
        runner.send_signal(signal.SIGINT)
        assert runner.wait(30) == 0
        assert runner.stderr is not None
        assert not runner.stderr.read()


@pytest.mark.slow
def test_a_background_job_of_a_script_outlives_its_ctrl_c() -> None:
    """A background job ignores Ctrl-C, and the server prints another way to end it."""
    with handled(signal.SIGINT, signal.SIG_IGN), group() as runner:
        assert ui.way_to_end() == f"kill {os.getpid()}"
        wait_until("ready", runner)
        runner.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            runner.wait(2)
        runner.terminate()
        assert runner.wait(30) == 128 + signal.SIGTERM
