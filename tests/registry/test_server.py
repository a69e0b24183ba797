"""A real `mlflow server`, started by `python -m registry ui`, over the store that runs write to directly."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from registry import browse, spool, store
from registry import publish as publishing
from registry.publish import Published
from registry.track import Tracker
from tests.tools import versions


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def registry_ui(folder: Path, port: int) -> Iterator[str]:
    """The server on the store of `folder`, ended by Ctrl-C; checks that no process of it is left."""
    environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    environment["PYTHONPATH"] = str(Path(store.__file__).parents[1])
    arguments = [sys.executable, "-m", "registry", "ui", "--port", str(port)]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(arguments, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        url = f"http://127.0.0.1:{port}"
        assert server.stdout is not None
        assert server.stdout.readline().startswith(f"{url}/#/models")
        wait_for(f"{url}/health", server)
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(100) == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def wait_for(url: str, server: "subprocess.Popen[str]", seconds: float = 200) -> None:
    for _ in range(int(seconds * 5)):
        with suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
            if answer.status == 200:
                return
        assert server.poll() is None, "the server ended"
        time.sleep(0.2)
    raise AssertionError(f"{url} did not come up")


def issue(run_dir: Path, run_id: str | None, uri: str) -> Published:
    return versions.issue(run_dir / "handover", uri, run_id=run_id)


def track(run_dir: Path, uri: str) -> str | None:
    tracker = Tracker(run_dir, uri)
    tracker.start("digits", run_dir.name, {"epochs": 3})
    tracker.log({"loss": 1.0}, 0)
    tracker.log_artifacts(run_dir / "handover")
    tracker.finish()
    return tracker.run_id


def test_direct_server_and_spooled_runs_meet_in_one_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    database, port = f"sqlite:///{tmp_path}/mlflow.db", free_port()
    url = f"http://127.0.0.1:{port}"
    folders = {name: versions.certified(tmp_path / "runs" / name) for name in ("direct", "spooled", "live")}

    assert issue(tmp_path / "runs" / "direct", track(tmp_path / "runs" / "direct", database), database).version
    away = track(tmp_path / "runs" / "spooled", url)  # the server is not up yet
    assert issue(tmp_path / "runs" / "spooled", away, url).version is None

    with registry_ui(tmp_path, port):
        published = publishing.sync(tmp_path / "runs" / "spooled", url)
        assert published is not None
        assert (published.version, published.champion) == ("2", False)
        assert not spool.waiting(tmp_path / "runs" / "spooled")
        assert issue(tmp_path / "runs" / "live", track(tmp_path / "runs" / "live", url), url).version == "3"
        assert_all_there(url, folders, tmp_path / "cache-server", monkeypatch)
        assert_a_name_that_is_not_its_own_is_said(port, monkeypatch)
        # the pages of the browser fetch through these routes:
        for version in browse.versions("tiny", url):
            got = f"{url}/get-artifact?path=certificate.json&run_uuid={version.run_id}"
            with urllib.request.urlopen(got, timeout=10) as answer:
                assert json.loads(answer.read())["run"] in folders
    assert_all_there(database, folders, tmp_path / "cache-direct", monkeypatch)


def assert_a_name_that_is_not_its_own_is_said(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow turns such requests away, which is neither absence nor a wrong password."""
    asked = socket.getaddrinfo

    def here(host: str, *how: Any, **more: Any) -> Any:
        return asked("127.0.0.1" if host == "registry.example" else host, *how, **more)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", here)
        with pytest.raises(store.Away, match=r"not to that name.*MLFLOW_SERVER_ALLOWED_HOSTS") as caught:
            browse.versions("tiny", f"http://registry.example:{port}")
    assert "is away" not in str(caught.value)
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
        environment = os.environ | {"PYTHONPATH": str(Path(store.__file__).parents[1])}
        arguments = [sys.executable, "-m", "registry", "ui", "--port", port]
        done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "choose another --port" in done.stderr
