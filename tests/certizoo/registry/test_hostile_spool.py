"""A foreign spool goes only to our server, carries none of our data, and stays in its own run."""

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from certizoo import UserError
from certizoo.registry import browse, publish, records, spool, store
from certizoo.registry.__main__ import main
from certizoo.registry.track import Tracker
from tests.tools import versions
from tests.tools.cases import mostly_slow

AWAY = "http://127.0.0.1:9"  # the discard port: connection refused
START = {"kind": "start", "experiment": "e", "run_name": "r", "params": {"a": "1"}, "run_id": None, "key": "k1",
         "time": 1, "uri": AWAY}  # fmt: skip
FINISH = {"kind": "finish", "status": "FINISHED", "time": 2}


@pytest.fixture
def uri(store_in: str) -> str:
    return store_in


@pytest.fixture
def listener() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Start a foreign server that records the headers of its requests."""
    heard: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(dict(self.headers))
            self.send_error(404)

        do_POST = do_PUT = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", heard
    server.shutdown()
    server.server_close()


def write(run_dir: Path, *lines: Any) -> Path:
    run_dir.mkdir(exist_ok=True)
    text = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    (run_dir / spool.SPOOL).write_text("".join(f"{line}\n" for line in text))
    return run_dir


def runs(uri: str, experiment: str = "e") -> list[Any]:
    client = store.connect(uri)
    return list(client.search_runs([store.experiment_id(client, experiment)]))


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["registry", *arguments])
    main()


@pytest.mark.hostile
@pytest.mark.parametrize("how", ["--uri", "MLFLOW_TRACKING_URI"])
@pytest.mark.parametrize("kind", ["tracking", "publication"])
def test_a_spool_is_sent_where_the_person_says_and_its_server_hears_nothing(
    uri: str, tmp_path: Path, listener: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch, how: str, kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    named, heard = listener
    run_dir = tmp_path / "received"
    if kind == "tracking":
        write(run_dir, START | {"uri": named}, FINISH)
    else:
        versions.issue(versions.certified(run_dir), AWAY)
        waiting = run_dir / publish.SPOOL
        waiting.write_text(json.dumps(json.loads(waiting.read_text()) | {"uri": named}))
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    if how == "MLFLOW_TRACKING_URI":
        monkeypatch.setenv(how, uri)
    typed(monkeypatch, "sync", str(run_dir), *(["--uri", uri] if how == "--uri" else []))
    assert heard == []
    assert len(runs(uri)) == 1 if kind == "tracking" else browse.versions("tiny", uri)
    assert named in capsys.readouterr().out, "the person sees where it was meant to go"


@pytest.mark.hostile
def test_a_spool_for_a_server_does_not_go_into_a_default_database(uri: str, tmp_path: Path) -> None:
    """Without a given target a guess would scatter runs, and the spool's own target is not trusted."""
    run_dir = write(tmp_path / "received", START, FINISH)
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9.*--uri"):
        spool.sync(run_dir)
    assert runs(uri) == []


@pytest.mark.hostile
@pytest.mark.parametrize("case", ["absolute", "dotdot", "link to a folder", "link in the folder", "path above"])
def test_a_spool_sends_no_file_from_outside_its_run_folder(uri: str, tmp_path: Path, case: str) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "id_rsa").write_text("KEY")
    run_dir = tmp_path / "received"
    (run_dir / "own").mkdir(parents=True)
    (run_dir / "own" / "a.txt").write_text("a")
    record: dict[str, Any] = {"kind": "artifacts", "folder": "own", "path": "own"}
    match case:
        case "absolute":
            record["folder"] = str(private)
        case "dotdot":
            record["folder"] = "own/../../private"
        case "link to a folder":
            (run_dir / "linked").symlink_to(private)
            record["folder"] = "linked"
        case "link in the folder":
            (run_dir / "own" / "b.txt").symlink_to(private / "id_rsa")
        case "path above":
            record["path"] = "../../../../stolen"
    write(run_dir, START, record, FINISH)
    spool.sync(run_dir, uri)
    (run,) = runs(uri)
    assert run.info.status == "FINISHED", "the rest arrives"
    assert not [path for path in tmp_path.rglob("*") if "mlartifacts" in path.parts and path.name == "id_rsa"]
    assert not list(tmp_path.rglob("stolen"))
    assert store.connect(uri).list_artifacts(run.info.run_id) == []
    assert len((run_dir / spool.REFUSED).read_text().splitlines()) == 1


LONG = 10**6
MALFORMED = {
    "no object": [1, 2],
    "no kind": {"rows": []},
    "unknown kind": {"kind": "exec", "command": "rm"},
    "kind of another type": {"kind": ["metrics"], "rows": []},
    "rows no list": {"kind": "metrics", "rows": "abcd"},
    "row too short": {"kind": "metrics", "rows": [["a", 1.0, 1]]},
    "name no text": {"kind": "metrics", "rows": [[{"a": 1}, 1.0, 1, 0]]},
    "value no number": {"kind": "metrics", "rows": [["a", "1.0", 1, 0]]},
    "value beyond float": '{"kind": "metrics", "rows": [["a", 1' + "0" * 400 + ", 1, 0]]}",
    "time NaN": '{"kind": "metrics", "rows": [["a", 1.0, NaN, 0]]}',
    "step infinite": '{"kind": "metrics", "rows": [["a", 1.0, 1, Infinity]]}',
    "step beyond 64 bit": {"kind": "metrics", "rows": [["a", 1.0, 1, 2**70]]},
    "key of a megabyte": {"kind": "metrics", "rows": [["a" * LONG, 1.0, 1, 0]]},
    "line of five megabytes": {"kind": "metrics", "rows": [["a", 1.0, 1, 0]], "note": "x" * 5 * LONG},
    "deep": "[" * 100_000,
    "artifacts of a number": {"kind": "artifacts", "folder": 3, "path": None},
    "a status that is none": {"kind": "finish", "status": "DELETED", "time": 2},
    "a second start's params": START | {"params": {"a": ["1"]}},
    "a second start's key": START | {"key": "x' OR tags.a = 'b"},
    "half a character": '{"kind": "metrics", "rows": [["\\ud800", 1.0, 1, 0]]}',
    "half a character in a start": json.dumps(START | {"experiment": "\ud800"}),
    "NUL in a start": START | {"params": {"a": "\0"}},
    "a time with a fraction": {"kind": "metrics", "rows": [["a", 1.0, 1.5, 0]]},
    "no UTF-8": "\udcff\udcfe",
}  # fmt: skip


@pytest.mark.hostile
@pytest.mark.parametrize("case", mostly_slow(MALFORMED, *list(MALFORMED)[::4]))
def test_a_malformed_record_is_set_aside_and_the_others_arrive(
    uri: str, tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "received"
    run_dir.mkdir()
    bad = MALFORMED[case]
    line = bad.encode("utf-8", "surrogateescape") if isinstance(bad, str) else json.dumps(bad).encode()
    good = [{"kind": "metrics", "rows": [["loss", 0.5, 1, 0]]}, FINISH]
    lines = [json.dumps(START).encode(), line, *(json.dumps(record).encode() for record in good)]
    (run_dir / spool.SPOOL).write_bytes(b"\n".join(lines) + b"\n")
    with caplog.at_level(logging.WARNING, logger="registry"):
        spool.sync(run_dir, uri)
    (run,) = runs(uri)
    assert run.data.metrics == {"loss": 0.5}
    assert run.info.status == "FINISHED"
    kept = (run_dir / spool.REFUSED).read_text().splitlines()
    assert len(kept) == 1
    assert len(kept[0]) < 10_000
    json.loads(kept[0])
    said = [record.getMessage() for record in caplog.records if "set aside" in record.getMessage()]
    assert len(said) == 1
    assert len(said[0].splitlines()) == 1
    assert len(said[0]) < 1000


STATES: dict[str, Any] = {
    "no JSON": "{torn",
    "a list": [1],
    "offset below zero": {"run_id": None, "offset": -5, "uri": None},
    "offset beyond the end": {"run_id": None, "offset": 10**9, "uri": None},
    "offset a text": {"run_id": None, "offset": "0", "uri": None},
    "run_id that queries": {"run_id": "spool-x' OR '1", "offset": 0, "uri": None},
    "run_id a list": {"run_id": ["a"], "offset": 0, "uri": None},
    "nothing": {},
}


@pytest.mark.hostile
@pytest.mark.parametrize("case", STATES)
def test_a_state_that_is_none_begins_again(uri: str, tmp_path: Path, case: str) -> None:
    run_dir = write(tmp_path / "received", START, {"kind": "metrics", "rows": [["loss", 0.5, 1, 0]]}, FINISH)
    state = STATES[case]
    (run_dir / spool.STATE).write_text(state if isinstance(state, str) else json.dumps(state))
    spool.sync(run_dir, uri)
    (run,) = runs(uri)
    assert run.data.metrics == {"loss": 0.5}


@pytest.mark.hostile
@pytest.mark.parametrize("name", [spool.SPOOL, spool.STATE, f"{spool.STATE}.part", spool.REFUSED, publish.SPOOL])
def test_a_link_in_the_place_of_a_spool_file_is_refused(uri: str, tmp_path: Path, name: str) -> None:
    """Writing through the link would put the spool's text into any file of ours."""
    run_dir = write(tmp_path / "received", START, {"kind": "exec"}, FINISH)
    target = tmp_path / "bashrc"
    target.write_text("mine")
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).symlink_to(target)
    with pytest.raises(UserError, match="is a link"):
        publish.sync(run_dir, uri) if name == publish.SPOOL else spool.sync(run_dir, uri)
    assert target.read_text() == "mine"


PUBLICATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a folder above": ({"folder": ".."}, "outside"),
    "an absolute folder": ({"folder": "/etc"}, "outside"),
    "a folder of a number": ({"folder": 3}, "folder"),
    "an unknown key": ({"exec": "rm"}, "exec"),
    "tags no mapping": ({"tags": ["a"]}, "tags"),
    "tags of lists": ({"tags": {"dataset": ["a"]}}, "tags"),
    "metrics of texts": ({"metrics": {"a": "b"}}, "metrics"),
    "a run that queries": ({"run_id": "spool-x' OR '1"}, "run_id"),
    "a module of Python": ({"loader_module": "os"}, "loader_module"),
    "a module by path": ({"loader_module": "..evil"}, "loader_module"),
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
    waiting = run_dir / publish.SPOOL
    waiting.write_text(json.dumps(json.loads(waiting.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        publish.sync(run_dir, uri)
    assert not [v for v in browse.versions(uri=uri) if v.name != "tiny"]
    assert browse.versions(uri=uri) == []


@pytest.mark.hostile
@pytest.mark.parametrize("text", ["{torn", "[]", "3", '{"folder": "handover"}', "[" * 100_000])
def test_a_publication_that_is_no_object_is_refused_in_one_line(uri: str, tmp_path: Path, text: str) -> None:
    (tmp_path / "received").mkdir()
    (tmp_path / "received" / publish.SPOOL).write_text(text)
    with pytest.raises(UserError, match=publish.SPOOL):
        publish.sync(tmp_path / "received", uri)


@pytest.mark.hostile
@pytest.mark.parametrize("experiment", ["..", ".", "../../up", "a/../../b"])
def test_an_experiment_s_name_leads_nowhere(uri: str, tmp_path: Path, experiment: str) -> None:
    """A folder is named after the experiment."""
    client = store.connect(uri)
    location = client.get_experiment(store.experiment_id(client, experiment)).artifact_location
    assert Path(location.removeprefix("file://")).resolve().parent == tmp_path / "mlartifacts"


@pytest.mark.slow  # called from threads by the test below
def test_two_syncs_of_one_spool_send_it_once(uri: str, tmp_path: Path) -> None:
    rows = [{"kind": "metrics", "rows": [["loss", 0.5, step, step]]} for step in range(50)]
    run_dir = write(tmp_path / "run", START, *rows, FINISH)
    code = f"from pathlib import Path; from certizoo.registry import spool; spool.sync(Path({str(run_dir)!r}), {uri!r})"
    root = Path(store.__file__).parents[2]
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=root, stderr=subprocess.PIPE) for _ in range(2)]
    for process in both:
        _, errors = process.communicate()
        assert process.returncode == 0, errors.decode()
    (run,) = runs(uri)
    assert len(store.connect(uri).get_metric_history(run.info.run_id, "loss")) == 50
    assert not spool.waiting(run_dir)


def test_a_training_does_not_wait_for_somebody_who_sends_its_spool(uri: str, tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run", START)
    code = (
        f"import sys, time; from pathlib import Path; from certizoo.locks import locked\n"
        f"with locked(Path({str(run_dir / spool.LOCK)!r})): print('held', flush=True); time.sleep(60)"
    )
    root = Path(store.__file__).parents[2]
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        tracker = Tracker(run_dir, uri)
        tracker.start("e", "r", {})
        tracker.log({"loss": 1.0}, 0)
        tracker.finish()
        assert spool.waiting(run_dir)
    finally:
        holder.kill()
        holder.wait()
    spool.sync(run_dir, uri)
    assert len(runs(uri)) == 2, "the spool of an earlier session, and its own"


def test_a_start_sent_twice_at_once_is_one_run(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines, or a repeated request, both saw no run before they created theirs."""
    client, real = store.connect(uri), records.find_run
    first = records.open_run(client, START)
    looks: list[int] = []

    def late(*arguments: Any) -> str | None:
        """Hide the other run at the first look."""
        looks.append(1)
        return None if len(looks) == 1 else real(*arguments)

    monkeypatch.setattr(records, "find_run", late)
    assert records.open_run(client, START) == first
    assert [run.info.run_id for run in runs(uri)] == [first]
