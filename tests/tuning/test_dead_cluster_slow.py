"""RAY_ADDRESS of a cluster that is gone: tune.py says so within half a minute, in one line that names the variable."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from certizoo.errors import EXIT_USER_ERROR
from certizoo.ports import RAY_ADDRESS, free_port
from tests.tools.tuning_runs import begin, finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@contextmanager
def silent() -> Iterator[int]:
    """Listen without an answer, as another program or a hung cluster does."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield int(server.getsockname()[1])


@contextmanager
def closed() -> Iterator[int]:
    yield free_port()


@pytest.mark.parametrize("port", [closed, silent])
def test_a_dead_cluster_is_one_line(port, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    with port() as number:
        monkeypatch.setenv(RAY_ADDRESS, f"127.0.0.1:{number}")
        status, output = finish(begin(tmp_path, "--space", "msvp"), tmp_path, 30)
    assert status == EXIT_USER_ERROR, output
    assert f"error: {RAY_ADDRESS}=127.0.0.1:{number} does not answer" in output.splitlines()[-1]
    assert "Traceback" not in output
