"""Foreign weights are accepted only by their sha256, within their size limit, and leave no other file."""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from safetensors.torch import save_file

import zoo
from certizoo import UserError
from zoo.weights import fetch, table

NAME = "cert_vit_c10"


@contextmanager
def serving(answers: dict[str, tuple[int, dict[str, str], bytes]]) -> Iterator[tuple[str, list[str]]]:
    """Start a web server with answers (status, headers, body) by path; return its address and its requests."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status, headers, body = answers.get(self.path, (404, {}, b""))
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for key in ("http_proxy", "https_proxy", "all_proxy", table.MIRROR):
        monkeypatch.delenv(key, raising=False)
        monkeypatch.delenv(key.upper(), raising=False)
    monkeypatch.setenv("CERTIZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def whole(content: bytes) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Length": str(len(content))}, content


def handover_files() -> dict[str, bytes]:
    return {file: (table.HERE / NAME / file).read_bytes() for file in (table.WEIGHTS, table.CONFIG)}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn the packaged model into one that has to be fetched."""
    entry = replace(table.entry(NAME), source="https://weights.invalid/zoo")
    monkeypatch.setattr(table, "entries", lambda: {NAME: entry})


def test_a_model_is_fetched_once_and_then_offline(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"/mirror/{NAME}/{file}": whole(content) for file, content in handover_files().items()}
    with serving(files) as (url, asked):
        monkeypatch.setenv(table.MIRROR, f"{url}/mirror")
        first = zoo.create_model(NAME, pretrained=True).state_dict()
    assert sorted(asked) == sorted(files)
    again = zoo.create_model(NAME, pretrained=True).state_dict()  # the server has stopped
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_a_folder_of_this_machine_is_a_mirror_too(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(table.MIRROR, str(table.HERE))
    zoo.create_model(NAME, pretrained=True)


def test_offline_it_says_in_one_line_what_to_do(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({}) as (url, _):
        pass
    monkeypatch.setenv(table.MIRROR, url)
    with pytest.raises(UserError, match=r"could not be fetched .*refused.*set CERTIZOO_WEIGHTS") as error:
        zoo.create_model(NAME, pretrained=True)
    assert "\n" not in str(error.value)


def test_a_changed_file_in_the_cache_is_fetched_again(
    elsewhere: None, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(table.MIRROR, str(table.HERE))
    file = table.handover_of(NAME) / table.WEIGHTS
    file.write_bytes(b"x" + file.read_bytes()[1:])
    assert (table.handover_of(NAME) / table.WEIGHTS).read_bytes() == handover_files()[table.WEIGHTS]


def test_a_url_of_the_users_own(tmp_path: Path) -> None:
    """pretrained=URL#sha256=HEX gives the weights; without the digest it is refused before any request."""
    weights = handover_files()[table.WEIGHTS]
    with serving({"/a/w.safetensors": whole(weights)}) as (url, asked):
        place = f"{url}/a/w.safetensors"
        for wrong in (place, f"{place}#sha256=12", f"{url}/a/w.pth#sha256={'0' * 64}"):
            with pytest.raises(UserError, match=r"has no digest|is not a \.safetensors"):
                zoo.create_model(NAME, pretrained=wrong)
        assert not asked
        model = zoo.create_model(NAME, pretrained=f"{place}#sha256={hashlib.sha256(weights).hexdigest()}")
    published = zoo.create_model(NAME, pretrained=True).state_dict()
    assert all(torch.equal(value, published[key]) for key, value in model.state_dict().items())


def test_the_hub_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """hf-hub:OWNER/REPOSITORY@REVISION/FILE is the hub's address of that revision, behind its redirection."""
    weights = handover_files()[table.WEIGHTS]
    digest = hashlib.sha256(weights).hexdigest()
    answers = {
        "/o/r.v1/resolve/abc/model.safetensors": (302, {"Location": "/cdn"}, b""),
        "/cdn": whole(weights),
    }
    with serving(answers) as (url, asked):
        monkeypatch.setenv("HF_ENDPOINT", url)
        zoo.create_model(NAME, pretrained=f"hf-hub:o/r.v1@abc/model.safetensors#sha256={digest}")
        assert asked == list(answers)
        with pytest.raises(UserError, match="is not a file of the hub"):
            zoo.create_model(NAME, pretrained=f"hf-hub:o/model.safetensors#sha256={digest[::-1]}")


@pytest.mark.hostile
@pytest.mark.parametrize("fault", ["another", "larger", "cut off", "to a file", "to ftp", "error"])
def test_a_hostile_server_leaves_nothing(
    fault: str, elsewhere: None, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other, endless or truncated weights and redirections off the web give one line and leave no file."""
    right = handover_files()
    weights = right[table.WEIGHTS]
    secret = tmp_path / "secret"
    secret.write_bytes(weights)
    answer = {
        "another": whole(weights[:-1] + b"?"),
        "larger": whole(weights + bytes(2**21)),
        "cut off": (200, {"Content-Length": str(len(weights))}, weights[:1000]),
        "to a file": (302, {"Location": f"file://{secret}"}, b""),
        "to ftp": (302, {"Location": "ftp://127.0.0.1/w"}, b""),
        "error": (500, {}, weights),
    }[fault]
    answers = {f"/{NAME}/{table.WEIGHTS}": answer, f"/{NAME}/{table.CONFIG}": whole(right[table.CONFIG])}
    with serving(answers) as (url, _):
        monkeypatch.setenv(table.MIRROR, url)
        with pytest.raises(UserError) as error:
            zoo.create_model(NAME, pretrained=True)
    assert table.MIRROR in str(error.value)
    assert not [path for path in own_cache.rglob("*") if path.is_file()]


def test_two_that_fetch_side_by_side_spoil_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks do this: a second fetch during the first writes to its own file."""
    content = handover_files()[table.WEIGHTS]
    digest, path = hashlib.sha256(content).hexdigest(), tmp_path / "w"
    real, once = fetch._chunks, iter([True])

    def chunks(place: str, most: int, fix: str) -> Iterator[bytes]:
        parts = list(real(place, most, fix))
        half = len(parts) // 2
        yield from parts[:half]
        if next(once, False):
            with monkeypatch.context() as other:
                other.setattr("os.getpid", lambda: -1)
                fetch.fetched(place, digest, path, most, fix)
        yield from parts[half:]

    monkeypatch.setattr(fetch, "_chunks", chunks)
    monkeypatch.setattr(fetch, "CHUNK", 2**16)
    fetch.fetched(str(table.HERE / NAME / table.WEIGHTS), digest, path, 10**7, "try again")
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["w"]


@pytest.mark.hostile
def test_only_safetensors_are_read(tmp_path: Path) -> None:
    """A pickle with the right digest is still not a safetensors file."""
    import pickle

    content = pickle.dumps({"head.weight": 1})
    with serving({"/w.safetensors": whole(content)}) as (url, _):
        place = f"{url}/w.safetensors#sha256={hashlib.sha256(content).hexdigest()}"
        with pytest.raises(UserError, match="is damaged"):
            zoo.create_model(NAME, pretrained=place)


def test_a_name_is_no_path_out_of_the_cache(tmp_path: Path) -> None:
    """The digest names the cache's file, whatever the address is."""
    save_file({"head.weight": torch.zeros(1)}, tmp_path / "w.safetensors")
    content = (tmp_path / "w.safetensors").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    with serving({"/../w.safetensors": whole(content)}) as (url, _):
        path = fetch.fetched(f"{url}/../w.safetensors", digest, fetch.cache_folder() / digest, 10**6, "try again")
    assert path.parent == fetch.cache_folder()
    shutil.rmtree(path.parent)
