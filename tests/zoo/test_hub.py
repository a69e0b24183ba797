"""Published weights on a stand-in for the Hugging Face hub: pushed, and loaded back by timm and by their digest."""

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import timm.models._hub
import torch
import yaml

import zoo
from certizoo import UserError
from certizoo.norms import NAMES
from zoo import hub
from zoo.__main__ import main
from zoo.weights import table

NAME, PLACE, TOKEN, COMMIT = "cert_vit_mnist", "hf-hub:owner/repo", "hf_secretsecret", "c0ffee" + "0" * 34


@dataclass
class Hub:
    """One repository: its files, who may write, and what was asked."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Serve the requests of `create_repo`, `upload_folder` and `hf_hub_download`."""
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            state.asked.append(("POST", self.path, self.headers.get("Authorization")))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.answer(401, json.dumps({"error": "Invalid\nusername or password."}).encode())
            said: dict[str, object] = {}
            if self.path.endswith("/repos/create"):
                said = {"url": f"{state.url}/owner/repo"}
            elif self.path.endswith("/preupload/main"):
                names = [file["path"] for file in json.loads(body)["files"]]
                said = {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}
            elif self.path.endswith("/commit/main"):
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        state.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                said = {"commitUrl": f"{state.url}/owner/repo/commit/{COMMIT}", "commitOid": COMMIT}
            return self.answer(200, json.dumps(said).encode())

        def do_GET(self) -> None:
            state.asked.append((self.command, self.path, None))
            found = state.files.get(self.path.rpartition("/")[2]) if "/owner/repo/resolve/" in self.path else None
            self.answer(404 if found is None else 200, found or b"")

        do_HEAD = do_GET

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    for key in ("http_proxy", "https_proxy", "all_proxy", table.MIRROR):
        monkeypatch.delenv(key, raising=False)
        monkeypatch.delenv(key.upper(), raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_ENDPOINT", state.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("CERTIZOO_CACHE", str(tmp_path / "cache"))
    here = partial(timm.models._hub.hf_hub_download, endpoint=state.url)  # HF_ENDPOINT is read at the import
    monkeypatch.setattr(timm.models._hub, "hf_hub_download", here)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield state
    server.shutdown()
    server.server_close()


def test_what_is_pushed_is_loaded_back(served: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """timm, the printed address with its digest, and an entry of the table give the certified weights."""
    main(["push", NAME, PLACE])
    printed = capsys.readouterr()
    assert served.files.keys() == {"model.safetensors", "config.yaml", "config.json", "README.md"}
    for file in (table.WEIGHTS, table.CONFIG):
        assert served.files[file] == (table.HERE / NAME / file).read_bytes()
    assert TOKEN not in printed.out + printed.err + str(served.files)
    expected = zoo.create_model(NAME, pretrained=True).state_dict()
    pinned = printed.out.strip()
    assert pinned == f"{PLACE}@{COMMIT}/model.safetensors#sha256={table.entry(NAME).sha256}"
    for model in (
        timm.create_model(PLACE, pretrained=True, cache_dir=tmp_path / "hub"),
        zoo.create_model(NAME, pretrained=pinned),
    ):
        assert model.state_dict().keys() == expected.keys()
        assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_a_pushed_repository_can_be_the_source_of_an_entry(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digests refuse weights that were changed on the hub."""
    main(["push", NAME, PLACE])
    there = {name: replace(table.entry(name), source=PLACE) for name in (NAME,)}
    monkeypatch.setattr(table, "entries", lambda: there)
    zoo.create_model(NAME, pretrained=True)
    served.files[table.WEIGHTS] = served.files[table.WEIGHTS][:-1] + b"?"
    (next(Path(table.fetch.cache_folder()).glob("*")) / table.WEIGHTS).unlink()
    with pytest.raises(UserError, match="has sha256"):
        zoo.create_model(NAME, pretrained=True)


def test_the_card_has_the_figures_of_the_table(tmp_path: Path) -> None:
    for said in table.entries().values():
        hub.write(said, tmp_path, PLACE)
        card, config = (tmp_path / hub.CARD).read_text(), (tmp_path / hub.TIMMS_CONFIG).read_text()
        assert yaml.safe_load(card.split("---\n")[1])["datasets"] == [said.dataset]
        for norm, curve in said.certified.items():
            for eps, share in curve.items():
                assert f"| {NAMES[norm]} | {eps:.4g} | {share:.1f} |" in card
        assert said.sha256 in card
        assert PLACE in card
        assert json.loads(config)["architecture"] == said.name
        assert str(table.HERE) not in config


@pytest.mark.parametrize("place", ["owner/repo", "hf-hub:repo", "hf-hub:owner/repo@main", "hf-hub:owner/repo/file"])
def test_another_place_is_refused_before_any_request(place: str, served: Hub) -> None:
    with pytest.raises(UserError, match="is no repository of the hub; write hf-hub:OWNER/REPOSITORY"):
        hub.push(NAME, place)
    assert not served.asked


def test_a_refusal_is_one_line_without_the_token(
    served: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token without rights, and a hub that is away."""
    wrong = "hf_anothersecret"
    for endpoint, fix in ((served.url, "hf auth login"), ("http://127.0.0.1:9", "cannot be reached")):
        monkeypatch.setenv("HF_TOKEN", wrong)
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(SystemExit) as left:
            main(["push", NAME, PLACE])
        said = capsys.readouterr().err
        assert left.value.code == 2
        assert said.startswith(f"error: {PLACE} could not be written (")
        assert len(said.splitlines()) == 1
        assert fix in said
        assert wrong not in said
    assert not served.files
