"""The page's server answers only its own page, one photograph at a time, within bounds."""

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from certify.photos import server as servers
from certify.photos.predict import Predictor
from certify.photos.server import BODY, Place, Server
from certizoo import UserError
from tests.tools.photo_server import serving

Encoded = Callable[..., bytes]


@pytest.fixture(scope="module")
def local(predict: Predictor) -> Iterator[Server]:
    with serving(predict, Place(port=0)) as server:
        yield server


def connected(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_address[1]))


def ask(server: Server, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes, Any]:
    """Return (status, content, headers) of one request, with the server's own name unless `Host` is given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    given = {key.replace("_", "-"): value for key, value in headers.items()}
    try:
        connection.request(method, path, body, given)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def test_the_page_loads_nothing_from_elsewhere(local: Server) -> None:
    status, content, headers = ask(local, "GET", "/")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "http" not in policy
    assert b"://" not in content
    assert b"class 1" in content or b"0, 1, 2" in content
    assert ask(local, "GET", "/etc/passwd")[0] == 404


def test_an_answer_is_what_the_command_says(local: Server, digit: Encoded) -> None:
    status, content, _ = ask(local, "POST", "/?norm=linf&name=a.png", digit(0), Content_Type=BODY)
    said = json.loads(content)
    assert (status, said["norm"], said["file"], len(said["panels"])) == (200, "linf", "a.png", 3)
    assert 0 < said["radius"] < said["attack_distance"]
    assert said["words"].startswith("a.png: ")
    assert all(panel["src"].startswith("data:image/png;base64,") for panel in said["panels"])


@pytest.mark.hostile
@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},  # a name that a stranger's DNS points at this machine
        {"Host": "127.0.0.1"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Content_Type": "text/plain"},  # content types that a form of another site can send without a preflight
        {"Content_Type": "multipart/form-data"},
    ],
)
def test_a_page_of_another_site_learns_nothing(headers: dict[str, str], local: Server, digit: Encoded) -> None:
    status, content, answered = ask(local, "POST", "/", digit(0), **{"Content_Type": BODY} | headers)
    assert status in (400, 403)
    assert set(json.loads(content)) == {"error"}
    assert "Access-Control-Allow-Origin" not in answered
    if "Host" in headers:
        assert ask(local, "GET", "/", None, **headers)[0] == 403


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"no image", {}),
        (b"x", {"Content_Length": str(2**40)}),
        (b"x", {"Content_Length": "-1"}),
        (b"x", {"Content_Length": "1e3"}),
    ],
)
def test_a_file_that_is_not_a_photograph_is_one_line(body: bytes, headers: dict[str, str], local: Server) -> None:
    status, content, _ = ask(local, "POST", "/?name=%1b[31m<script>", body, **{"Content_Type": BODY} | headers)
    assert status in (400, 413)
    assert "\x1b" not in json.loads(content)["error"]


def test_unknown_methods_and_norms_are_refused(local: Server, digit: Encoded) -> None:
    assert ask(local, "PUT", "/", digit(0))[0] == 501
    status, content, _ = ask(local, "POST", "/?norm=l3", digit(0), Content_Type=BODY)
    assert status == 400
    assert "norm of a certificate" in json.loads(content)["error"]


@pytest.mark.hostile
def test_any_other_address_requires_the_token(predict: Predictor, digit: Encoded) -> None:
    """Requests from beyond the loopback need the token, which is drawn anew unless it is given."""
    assert Place(host="0.0.0.0").needed != Place(host="0.0.0.0").needed
    assert Place().needed is None
    with serving(predict, Place(host="0.0.0.0", port=0)) as server:
        assert server.token
        assert f"?token={server.token}" in server.url
        umlaut = {"X_Token": "\xe4"}
        for path, headers in (("/", {}), ("/?token=", {}), (f"/?token={server.token[:-1]}", {}), ("/", umlaut)):
            assert ask(server, "GET", path)[0] == 403
            assert ask(server, "POST", path, digit(0), **{"Content_Type": BODY} | headers)[0] == 403
        assert ask(server, "GET", f"/?token={server.token}", Host="gpu.example:8000")[0] == 200
        allowed = {"Content_Type": BODY, "X_Token": server.token}
        assert ask(server, "POST", "/", digit(0), **allowed)[0] == 200


@pytest.mark.hostile
def test_idle_connections_time_out(predict: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections above AT_ONCE are closed at once, and a silent one after its time limit."""
    monkeypatch.setattr(servers.Handler, "timeout", 0.5)
    with serving(predict, Place(port=0)) as server:
        silent = [connected(server) for _ in range(servers.AT_ONCE + 4)]
        closed = 0
        for connection in silent:
            connection.settimeout(5)
            try:
                closed += connection.recv(1) == b""
            except ConnectionError:
                closed += 1
            connection.close()
        assert closed == len(silent)
    monkeypatch.setattr(servers, "PATIENCE", 0.5)
    monkeypatch.setattr(servers.Handler, "timeout", 30)
    with serving(predict, Place(port=0)) as server, connected(server) as dripping:
        dripping.settimeout(0.1)
        for _ in range(100):  # one byte at a time, never silent for long
            try:
                dripping.send(b"G")
                if dripping.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("a dripping connection stays open")
    with serving(predict, Place(port=0)) as server:
        assert ask(server, "GET", "/")[0] == 200


@pytest.mark.parametrize(
    ("place", "fix"),
    [({"port": 70_000}, "port=70000"), ({"port": "80.5"}, "port="), ({"token": "short"}, "at least 16"),
     ({"host": ""}, "host=")],
)  # fmt: skip
def test_a_place_that_is_none_is_refused(place: dict[str, Any], fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        Place(**place)


def test_a_port_that_is_taken_is_one_line(local: Server, predict: Predictor) -> None:
    with pytest.raises(UserError, match="set another: port=0"):
        Server(predict, replace(local.place, port=local.server_address[1]))
