"""A registry with a password: trials get it by environment; no file and no command line shows it."""

import base64
import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from certizoo.ports import free_port
from certizoo.registry import browse
from tests.tools.tuning_runs import SHORT, alive, begin, finish, finished
from tuning import server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

USER, PASSWORD = "anna", "c0rrect-h0rse"
HOP = {"transfer-encoding", "connection", "content-length"}


@contextmanager
def gate(port: int, behind: str) -> Iterator[set[str]]:
    """Forward requests with the right password to the server `behind`; yield the kinds of answers."""
    right = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    seen: set[str] = set()

    class Gate(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Authorization") != right:
                seen.add("refused")
                self.send_error(401)
                return
            seen.add("let in")
            onward = http.client.HTTPConnection(behind, timeout=60)
            onward.request(self.command, self.path, body, {"Content-Type": self.headers.get("Content-Type", "")})
            answer = onward.getresponse()
            content = answer.read()
            self.send_response(answer.status)
            for key, value in answer.getheaders():
                if key.lower() not in HOP:
                    self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_PATCH = do_PUT = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            pass

    serving = ThreadingHTTPServer(("127.0.0.1", port), Gate)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    try:
        yield seen
    finally:
        serving.shutdown()
        serving.server_close()


@contextmanager
def watched(words: str) -> Iterator[list[int]]:
    """Search all command lines for `words` five times a second; yield the processes that showed them."""
    ended, shown = threading.Event(), list[int]()

    def watch() -> None:
        while not ended.wait(0.2):
            shown.extend(alive(words))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield shown
    finally:
        ended.set()
        thread.join()


def holding(folder: Path, words: str) -> list[Path]:
    """Return the files below `folder` that contain `words`."""
    return [path for path in folder.rglob("*") if path.is_file() and words.encode() in path.read_bytes()]


def test_nobody_reads_the_password(tmp_path: Path) -> None:
    """Check the search, its trials, the registry and all output."""
    port, work = free_port(), tmp_path / "work"
    work.mkdir()
    options = ("--space", "msvp", "--num-samples", "1", "--scheduler", "none", "--search", "random", "--name", "x")
    database = f"sqlite:///{tmp_path}/store/mlflow.db"
    (tmp_path / "store").mkdir()
    with server.started(database, tmp_path / "server.log") as url, gate(port, url.removeprefix("http://")) as seen:
        with watched(PASSWORD) as shown:
            uri = f"http://{USER}:{PASSWORD}@127.0.0.1:{port}"
            status, output = finish(begin(work, *options, *SHORT, uri=uri), work, 900)
        assert status == 0, output
        assert f"registry http://127.0.0.1:{port}" in output
        assert seen == {"let in"}
        assert len(finished(work / "runs" / "tune" / "x")) == len(browse.versions("spec_vit_digits", uri)) == 1
    assert not shown, "a command line shows it"
    assert holding(tmp_path, "spec_vit_digits"), "nothing was searched"
    assert holding(tmp_path, PASSWORD) == []
