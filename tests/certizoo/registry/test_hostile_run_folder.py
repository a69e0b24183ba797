"""A foreign run folder goes only to our server, carries none of our data, and stays in its own run."""

import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from certizoo import UserError
from certizoo.registry import browse
from certizoo.registry.__main__ import main
from certizoo.registry.server import store
from certizoo.registry.tracking import run_folder, runs
from certizoo.registry.versions import publish
from tests.tools import versions
from tests.tools.tracking import AWAY, runs_of

STATE = {"experiment": "e", "run_name": "r", "uri": AWAY, "key": "k1", "began": 1, "status": "FINISHED", "ended": 2}
GOOD = {"step": 0, "time": 1, "loss": 0.5}


@pytest.fixture
def uri(store_in: str) -> str:
    return store_in


@pytest.fixture
def named() -> Iterator[str]:
    """Return the URI of a foreign server, and check that nobody has called it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def received(tmp_path: Path, *lines: bytes, config: str = "a: 1\n", **state: Any) -> Path:
    """Write a run folder that came from elsewhere, with these lines after a good row."""
    run_dir = tmp_path / "received"
    run_dir.mkdir()
    (run_dir / run_folder.CONFIG).write_text(config)
    (run_dir / run_folder.ROWS).write_bytes(b"".join(line + b"\n" for line in (json.dumps(GOOD).encode(), *lines)))
    (run_dir / run_folder.STATE).write_text(json.dumps(STATE | state))
    return run_dir


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["registry", *arguments])
    main()


@pytest.mark.hostile
@pytest.mark.parametrize("how", ["--uri", "MLFLOW_TRACKING_URI"])
@pytest.mark.parametrize("kind", ["run", "publication"])
def test_a_run_folder_is_sent_where_the_person_says_and_its_server_hears_nothing(
    uri: str, tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch, how: str, kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if kind == "run":
        run_dir = received(tmp_path, uri=named)
    else:
        run_dir = tmp_path / "received"
        versions.issue(versions.certified(run_dir), AWAY)
        waiting = run_dir / run_folder.PUBLICATION
        waiting.write_text(json.dumps(json.loads(waiting.read_text()) | {"uri": named}))
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    if how == "MLFLOW_TRACKING_URI":
        monkeypatch.setenv(how, uri)
    typed(monkeypatch, "sync", str(run_dir), *(["--uri", uri] if how == "--uri" else []))
    assert len(runs_of(uri)) == 1 if kind == "run" else browse.versions("tiny", uri)
    assert named in capsys.readouterr().out, "the person sees where it was meant to go"


@pytest.mark.hostile
def test_a_run_for_a_server_does_not_go_into_a_default_database(uri: str, tmp_path: Path) -> None:
    """Without a given target a guess would scatter runs, and the folder's own target is not trusted."""
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9.*--uri"):
        runs.sync(received(tmp_path))
    assert runs_of(uri) == []


@pytest.mark.hostile
@pytest.mark.parametrize("case", ["a link to a folder", "a link in the folder", "a pipe"])
def test_nothing_from_outside_the_run_folder_is_sent(
    uri: str, tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "id_rsa").write_text("KEY")
    run_dir = received(tmp_path)
    if case == "a link to a folder":
        (run_dir / "handover").symlink_to(private)
    else:
        (run_dir / "handover").mkdir()
    if case == "a link in the folder":
        (run_dir / "handover" / "b.txt").symlink_to(private / "id_rsa")
    if case == "a pipe":
        os.mkfifo(run_dir / "handover" / "b.txt")
    with caplog.at_level(logging.WARNING):
        runs.sync(run_dir, uri)
    (run,) = runs_of(uri)
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"loss": 0.5}), "the rest arrives"
    assert store.connect(uri).list_artifacts(run.info.run_id) == []
    assert len([record for record in caplog.records if "is not sent" in record.getMessage()]) == 1


LINES: dict[str, bytes] = {
    "no JSON": b"{torn",
    "no object": b"[1, 2]",
    "no step": b'{"time": 1, "loss": 1.0}',
    "no time": b'{"step": 1, "loss": 1.0}',
    "value a text": b'{"step": 1, "time": 1, "loss": "1.0"}',
    "value true": b'{"step": 1, "time": 1, "loss": true}',
    "value beyond float": b'{"step": 1, "time": 1, "loss": 1' + b"0" * 400 + b"}",
    "value beyond Python's whole numbers": b'{"step": 1, "time": 1, "loss": 1' + b"0" * 5000 + b"}",
    "step infinite": b'{"step": Infinity, "time": 1, "loss": 1.0}',
    "step beyond 64 bit": b'{"step": 1180591620717411303424, "time": 1, "loss": 1.0}',
    "time a fraction": b'{"step": 1, "time": 1.5, "loss": 1.0}',
    "a long name": b'{"step": 1, "time": 1, "' + b"a" * 100_000 + b'": 1.0}',
    "five megabytes": b'{"step": 1, "time": 1, "loss": 1.0, "' + b"x" * 5_000_000 + b'": 1.0}',
    "deep": b"[" * 100_000,
    "no UTF-8": b'{"step": 1, "time": 1, "\xff\xfe": 1.0}',
    "half a character": b'{"step": 1, "time": 1, "\\ud800": 1.0}',
    "NUL": b'{"step": 1, "time": 1, "\\u0000": 1.0}',
}


@pytest.mark.hostile
@pytest.mark.parametrize("case", LINES)
def test_a_line_that_is_no_row_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    run_dir = received(tmp_path, LINES[case])
    state = run_folder.load(run_dir)
    assert state
    with pytest.raises(UserError, match=r"is not a row of metrics.*remove it") as caught:
        list(run_folder.batches(run_dir, state))
    assert len(str(caught.value)) < 500


@pytest.mark.hostile
def test_a_name_that_mlflow_refuses_blocks_nothing(uri: str, tmp_path: Path) -> None:
    """MLflow treats names as paths, and refuses a whole request for one of them."""
    names = ["../../x", "/etc/x", "a//b", ".", "", "a?b", "x" * 400]
    lines = [json.dumps({"step": 1, "time": 1, name: 1.0}).encode() for name in names]
    runs.sync(received(tmp_path, *lines, config="'../x': 1\n'a//b': {'..': 2}\n"), uri)
    (run,) = runs_of(uri)
    assert set(run.data.metrics) == {"loss", "x", "etc/x", "a/b", "_", "a_b", "x" * 250}
    assert set(run.data.params) == {"x", "a/b..."}


STATES: dict[str, tuple[Any, str]] = {
    "no JSON": ("{torn", "not readable JSON"),
    "a list": ([1], "mapping"),
    "an unknown key": (STATE | {"exec": "rm"}, "exec"),
    "no experiment": ({"key": "k"}, "experiment"),
    "NUL": (STATE | {"run_name": "\0"}, "run_name"),
    "half a character": (STATE | {"run_name": "\ud800"}, "surrogates"),
    "a name of a mile": (STATE | {"run_name": "x" * 10_000}, "run_name"),
    "a key that queries": (STATE | {"key": "x' OR tags.a = 'b"}, "key"),
    "a run that queries": (STATE | {"run_id": "x' OR '1"}, "run_id"),
    "sent below zero": (STATE | {"sent": -5}, "sent"),
    "a time NaN": (STATE | {"began": float("nan")}, "began"),
    "an end beyond 64 bit": (STATE | {"ended": 2**70}, "ended"),
    "a status that is none": (STATE | {"status": "DELETED"}, "status"),
    "done a number": (STATE | {"done": 1}, "done"),
    "large": ("x" * (5 * 2**20), "larger than"),
    "deep": ("[" * 100_000, "JSON"),
}


@pytest.mark.hostile
@pytest.mark.parametrize("case", STATES)
def test_a_state_that_is_none_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    state, word = STATES[case]
    run_dir = received(tmp_path)
    (run_dir / run_folder.STATE).write_text(state if isinstance(state, str) else json.dumps(state))
    with pytest.raises(UserError, match=word) as caught:
        runs.sync(run_dir, f"sqlite:///{tmp_path}/none.db")
    assert len(str(caught.value)) < 1000
    assert not (tmp_path / "none.db").exists()


@pytest.mark.hostile
@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "3",
        "a: !!python/object/apply:os.system [id]",
        "a: [",
        "a:\n" + "".join(f"  k{n}: 1\n" for n in range(3000)),
    ],
)
def test_a_configuration_that_is_none_is_refused_in_one_line(uri: str, tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=run_folder.CONFIG):
        runs.sync(received(tmp_path, config=text), uri)


@pytest.mark.hostile
@pytest.mark.parametrize("name", [run_folder.STATE, f"{run_folder.STATE}.part", run_folder.ROWS, run_folder.CONFIG,
                                  run_folder.CHANGING, run_folder.SENDING, run_folder.PUBLICATION])  # fmt: skip
def test_a_link_in_the_place_of_our_files_is_refused(uri: str, tmp_path: Path, name: str) -> None:
    """Writing through the link would put our text into any file of ours; reading would send it."""
    run_dir = received(tmp_path)
    target = tmp_path / "bashrc"
    target.write_text("mine")
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).symlink_to(target)
    with pytest.raises(UserError, match=r"is a link|symbolic link"):
        publish.sync(run_dir, uri) if name == run_folder.PUBLICATION else runs.sync(run_dir, uri)
    assert target.read_text() == "mine"


@pytest.mark.hostile
@pytest.mark.parametrize("name", [run_folder.STATE, run_folder.ROWS, run_folder.CONFIG])
def test_a_pipe_in_the_place_of_our_files_blocks_nobody(uri: str, tmp_path: Path, name: str) -> None:
    run_dir = received(tmp_path)
    (run_dir / name).unlink()
    os.mkfifo(run_dir / name)
    runs.sync(run_dir, uri)
    assert not [run for run in runs_of(uri) if run.data.metrics]


PUBLICATIONS: dict[str, tuple[Any, str]] = {
    "no JSON": ("{torn", "not readable JSON"),
    "a list": ("[]", "mapping"),
    "a key alone": ('{"folder": "handover"}', "missing"),
    "deep": ("[" * 100_000, "not readable JSON"),
    "a folder above": ({"folder": ".."}, "outside"),
    "an absolute folder": ({"folder": "/etc"}, "outside"),
    "a folder of a number": ({"folder": 3}, "folder"),
    "an unknown key": ({"exec": "rm"}, "exec"),
    "tags no mapping": ({"tags": ["a"]}, "tags"),
    "tags of lists": ({"tags": {"dataset": ["a"]}}, "tags"),
    "metrics of texts": ({"metrics": {"a": "b"}}, "metrics"),
    "a module": ({"loader_module": "os"}, "loader_module"),
    "a name that climbs": ({"name": "../../x"}, "name"),
    "a name of dots": ({"name": ".."}, "name"),
    "a name of a mile": ({"name": "x" * 10_000}, "name"),
    "an experiment of a list": ({"experiment": [1]}, "experiment"),
}


@pytest.mark.hostile
@pytest.mark.parametrize("case", PUBLICATIONS)
def test_a_publication_that_is_none_is_refused_in_one_line(uri: str, tmp_path: Path, case: str) -> None:
    changes, message = PUBLICATIONS[case]
    run_dir = tmp_path / "received"
    versions.issue(versions.certified(run_dir), AWAY)
    waiting = run_dir / run_folder.PUBLICATION
    text = changes if isinstance(changes, str) else json.dumps(json.loads(waiting.read_text()) | changes)
    waiting.write_text(text)
    with pytest.raises(UserError, match=message):
        publish.sync(run_dir, uri)
    assert browse.versions(uri=uri) == []


@pytest.mark.hostile
@pytest.mark.parametrize("experiment", ["..", ".", "../../up", "a/../../b"])
def test_the_name_of_an_experiment_cannot_leave_the_folder(uri: str, tmp_path: Path, experiment: str) -> None:
    """A folder is named after the experiment."""
    client = store.connect(uri)
    location = client.get_experiment(store.experiment_id(client, experiment)).artifact_location
    assert Path(location.removeprefix("file://")).resolve().parent == tmp_path / "mlartifacts"
