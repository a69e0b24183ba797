"""RAY_ADDRESS names a cluster that answers, or the error is one line and early; a dead one of before is left out."""

import socket
import time
from pathlib import Path
from threading import Thread

import pytest

from certizoo import UserError, ports
from certizoo.ports import free_port, ray_address


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "localhost:{}"])
def test_a_dead_cluster_is_named_at_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address := form.format(free_port()))
    start = time.monotonic()
    with pytest.raises(UserError, match=f"RAY_ADDRESS={address} does not answer"):
        ray_address()
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("address", ["head.invalid:6379", "127.0.0.1:99999", "127.0.0.1:x"])
def test_an_impossible_address_is_one_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match="does not answer"):
        ray_address()


def test_a_port_that_says_nothing_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(UserError, match=r"does not answer .timed out"):
            ray_address()


def test_a_cluster_that_answers_and_words_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        greeting = Thread(target=lambda: server.accept()[0].send(b"\0\0\0\4\0"))
        greeting.start()
        for address in (f"127.0.0.1:{server.getsockname()[1]}", "auto", "local", ""):
            monkeypatch.setenv("RAY_ADDRESS", address)
            assert ray_address() is None
        greeting.join()


def test_a_cluster_that_was_started_here_and_has_died_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_address() is None
    note = tmp_path / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    note.write_text(f"127.0.0.1:{free_port()}")
    assert ray_address() == "local"
    assert f"the Ray cluster {note.read_text()}, started here before, does not answer" in caplog.text
    with socket.create_server(("127.0.0.1", 0)) as server:
        greeting = Thread(target=lambda: server.accept()[0].send(b"\0\0\0\4\0"))
        greeting.start()
        note.write_text(f"127.0.0.1:{server.getsockname()[1]}")
        assert ray_address() is None
        greeting.join()
