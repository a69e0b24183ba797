"""RAY_ADDRESS names a cluster that answers, or the error is one line and early."""

import socket
import time

import pytest

from certizoo import UserError
from certizoo.ports import free_port, require_ray


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "localhost:{}"])
def test_a_dead_cluster_is_named_at_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address := form.format(free_port()))
    start = time.monotonic()
    with pytest.raises(UserError, match=f"RAY_ADDRESS={address} does not answer"):
        require_ray()
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("address", ["head.invalid:6379", "127.0.0.1:99999", "127.0.0.1:x"])
def test_an_impossible_address_is_one_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match="does not answer"):
        require_ray()


def test_a_cluster_that_answers_and_words_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        for address in (f"127.0.0.1:{server.getsockname()[1]}", "auto", "local", ""):
            monkeypatch.setenv("RAY_ADDRESS", address)
            require_ray()
    monkeypatch.delenv("RAY_ADDRESS")
    require_ray()
