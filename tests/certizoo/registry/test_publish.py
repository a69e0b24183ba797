"""Publishing and browsing on a local store: only with a certificate, once, byte for byte."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certizoo import UserError
from certizoo.registry import browse
from certizoo.registry.__main__ import main
from certizoo.registry.server import store
from certizoo.registry.tracking import run_folder, runs
from certizoo.registry.versions import manifest, package
from certizoo.registry.versions import publish as publishing
from certizoo.registry.versions.publish import Published
from tests.tools import versions
from tests.tools.tracking import AWAY, begin
from tests.tools.versions import HEADLINE

Publish = Callable[..., Published]


@pytest.fixture
def uri(store_in: str) -> str:
    return store_in


def handover(run_dir: Path, certified: float = 0.4, **stated: Any) -> Path:
    """Make a hand-over with a folder of pictures, and a pickle that must not be published."""
    folder = versions.certified(run_dir, certified, **stated)
    (folder / "plots").mkdir()
    (folder / "plots" / "curve.png").write_bytes(b"\x89PNG")
    (folder / "checkpoint.pt").write_bytes(b"a pickle")
    return folder


@pytest.fixture
def issue(uri: str) -> Publish:
    return lambda folder, **changes: versions.issue(folder, **({"uri": uri} | changes))


def test_tags_description_and_metrics_come_back(issue: Publish, uri: str, tmp_path: Path) -> None:
    published = issue(handover(tmp_path / "a"), metrics={HEADLINE: 0.4})
    assert published == Published("tiny", "1", "models:/tiny/1", champion=True)
    (version,) = browse.versions("tiny")
    assert version.tags[HEADLINE] == "0.4000"
    assert version.tags["dataset"] == "digits"
    assert version.aliases == ("champion", "champion-digits")
    assert version.description == "# Card\nall of it"
    client = store.connect(uri)
    experiment = store.experiment_id(client, "digits")
    (model,) = client.search_logged_models([experiment], filter_string=f"metrics.`{HEADLINE}` > 0.39")
    assert model.status == "READY"
    assert version.run_id == model.source_run_id


def test_download_is_byte_equal_and_leaves_pickles_out(issue: Publish, tmp_path: Path) -> None:
    folder = handover(tmp_path / "a")
    issue(folder)
    for reference in ("tiny@champion", "tiny/1", "models:/tiny/1", "tiny"):
        got = browse.download(reference)
        names = {str(p.relative_to(got)) for p in got.rglob("*") if p.is_file()} - {manifest.FILE}
        wanted = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {"checkpoint.pt"}
        assert names == wanted
        assert all((got / name).read_bytes() == (folder / name).read_bytes() for name in names)


def test_a_download_whose_place_another_process_filled_meanwhile_is_that(
    issue: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks of a training fetch their teacher at once."""
    import mlflow.artifacts

    issue(handover(tmp_path / "a"))
    fetch = mlflow.artifacts.download_artifacts

    def slower(*arguments: Any, **how: Any) -> str:
        got = fetch(*arguments, **how)
        monkeypatch.setattr(mlflow.artifacts, "download_artifacts", fetch)
        assert browse.download("tiny/1").is_dir()
        return str(got)

    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", slower)
    assert (browse.download("tiny/1") / "model.safetensors").is_file()


def test_mlflow_itself_can_load_a_version_without_pickle(
    issue: Publish, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "LOADER", "tests.tools.loader")
    issue(handover(tmp_path / "a"))
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    import mlflow

    before = mlflow.get_tracking_uri(), mlflow.get_registry_uri()
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    try:
        model = mlflow.pyfunc.load_model("models:/tiny@champion")
    finally:
        mlflow.set_tracking_uri(before[0])
        mlflow.set_registry_uri(before[1])
    assert model.predict(np.ones((4, 3, 8, 8), np.float32)).shape == (4, 2)


def test_without_certificate_nothing_is_registered(issue: Publish, uri: str, tmp_path: Path) -> None:
    store.database(uri).unlink()
    folder = handover(tmp_path / "a")
    tags = versions.tags_of(folder)
    (folder / "certificate.json").write_text("{torn")
    with pytest.raises(UserError, match="not readable JSON"):
        issue(folder, all_tags=tags)
    (folder / "certificate.json").unlink()
    with pytest.raises(UserError, match=r"certificate\.json is missing"):
        issue(folder, all_tags=tags)
    assert not store.database(uri).exists()


def test_a_waiting_publication_that_mlflow_refuses_does_not_block_the_next(
    issue: Publish, uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = handover(tmp_path / "a")
    waits = Path(issue(folder, name="earlier", uri=AWAY).uri)
    waits.write_text(json.dumps(json.loads(waits.read_text()) | {"experiment": "x" * 300}))
    assert issue(folder).version == "1"
    assert "is dropped" in caplog.text
    assert [version.name for version in browse.versions()] == ["tiny"]


def test_a_name_that_the_disk_refuses_does_not_wait(uri: str) -> None:
    with pytest.raises(UserError, match="refuses") as refused, store.one_line(uri):
        Path("x" * 300).touch()
    assert not isinstance(refused.value, store.Away)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"headline": "certified_acc.0.3"}, "is missing from the publication"),
        ({"name": "a/b"}, "model name"),
        ({"experiment": "x" * 300}, "a name of up to 200 characters"),
    ],
)
def test_unfit_publications_are_refused(
    issue: Publish, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        issue(handover(tmp_path / "a"), **changes)


def test_the_same_certificate_is_published_once(issue: Publish, uri: str, tmp_path: Path) -> None:
    tracker = begin(tmp_path / "a", uri)
    run_id = tracker.run_id or ""
    tracker.finish()
    folder = handover(tmp_path / "a")
    assert issue(folder) == issue(folder)
    (version,) = browse.versions("tiny")
    assert version.run_id == run_id
    assert store.connect(uri).get_run(run_id).info.status == "FINISHED"
    said = json.loads((folder / "certificate.json").read_text())
    said["accuracy"][versions.EPS]["certified"] = 0.5
    (folder / "certificate.json").write_text(json.dumps(said))  # certified again: a new version
    assert issue(folder).version == "2"


def test_trials_of_two_searches_of_one_name_have_versions_of_their_own(issue: Publish, tmp_path: Path) -> None:
    """Two people may choose one name, and a search may begin again after its folder was removed."""

    def sent(run: str, search: str) -> str | None:
        return issue(handover(tmp_path / run), tags={"trial": "mine/0001", "search_id": search}).version

    assert [sent("first", "11"), sent("other", "22"), sent("again", "11")] == ["1", "2", "1"]


def test_a_search_that_has_ended_leaves_one_version_a_trial(
    issue: Publish, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(run: str, trial: str, search: str) -> None:
        issue(handover(tmp_path / run), tags={"trial": trial, "search_id": search})

    for run, trial, search in (("a", "s/1", "11"), ("b", "s/2", "11"), ("c", "s/1", "22")):
        send(run, trial, search)
    with monkeypatch.context() as killed:  # a worker that does not look for other versions after its own
        killed.setattr(publishing, "_find", lambda *_: None)
        send("d", "s/1", "11")
    assert [version.version for version in browse.versions("tiny")] == ["4", "3", "2", "1"]
    publishing.keep_one_a_trial("11", uri)
    assert [version.version for version in browse.versions("tiny")] == ["3", "2", "1"]


def test_unknown_names_list_what_exists(issue: Publish, uri: str, tmp_path: Path) -> None:
    store.database(uri).unlink()
    with pytest.raises(UserError, match="no registry at"):
        browse.versions()
    assert not store.database(uri).exists()
    issue(handover(tmp_path / "a"))
    with pytest.raises(UserError, match="choose one of tiny"):
        browse.download("huge@champion")
    with pytest.raises(UserError, match="choose one of tiny/1, tiny@champion"):
        browse.download("tiny@best")
    with pytest.raises(UserError, match="NAME/VERSION"):
        browse.download("tiny/1/2")
    with pytest.raises(UserError, match="does not answer"):
        browse.download("tiny/1", AWAY)


def test_away_publication_waits_with_its_run(issue: Publish, uri: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    begin(run_dir, AWAY, {"epochs": 3}).finish()
    waiting = issue(handover(run_dir), uri=AWAY)
    assert waiting.version is None
    assert waiting.uri == str(run_dir / run_folder.PUBLICATION)
    moved = run_dir.rename(tmp_path / "moved")
    copy = (moved / run_folder.PUBLICATION).read_bytes()
    published = publishing.sync(moved, uri)  # sync sends the run first
    assert published == Published("tiny", "1", "models:/tiny/1", champion=True)
    assert not runs.waiting(moved)
    assert publishing.sync(moved, uri) is None
    (moved / run_folder.PUBLICATION).write_bytes(copy)  # as if sync had died before it could delete it
    assert publishing.sync(moved, uri) == published
    (version,) = browse.versions()
    assert store.connect(uri).get_run(version.run_id).data.params == {"epochs": "3"}  # type: ignore[arg-type]


def test_commands(
    issue: Publish, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["registry", *arguments])
        main()
        return capsys.readouterr().out

    issue(handover(tmp_path / "runs" / "a"), uri=AWAY)
    assert run("sync", "--uri", uri).splitlines() == [
        f"runs/a: meant for {AWAY}, sent to {uri}",
        "runs/a: published models:/tiny/1 @champion",
    ]
    assert run("sync", "--uri", uri) == "nothing to send\n"
    listed = run("list")
    assert all(text in listed for text in ("tiny", "champion", HEADLINE, "0.4000", "digits"))
    shown = run("show", "tiny@champion")
    assert "all of it" in shown
    assert "certificate_sha256" in shown


def test_an_error_of_a_command_is_one_line(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(store.__file__).parents[2]))
    arguments = [sys.executable, "-m", "certizoo.registry", "show", "tiny@best", "--uri", AWAY]
    wrong = subprocess.run(arguments, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith(f"error: MLflow at {AWAY} does not answer")
    assert len(wrong.stderr.splitlines()) == 1
