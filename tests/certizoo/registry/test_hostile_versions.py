"""Versions that someone changed on the way: other bytes in the cache or store, texts with markup, edited tags."""

import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from certizoo import UserError
from certizoo.registry import browse
from certizoo.registry.__main__ import main
from certizoo.registry.annotate import annotate
from certizoo.registry.server import store
from certizoo.registry.versions import manifest, package, publish, version_tags
from tests.tools import versions
from tests.tools.cases import mostly_slow


@pytest.fixture
def uri(store_in: str, tmp_path: Path) -> str:
    """Make a store with one version, tiny/1."""
    versions.issue(versions.certified(tmp_path / "a"), store_in)
    return store_in


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["registry", *arguments])
    main()
    return capsys.readouterr().out


def swap(folder: Path, how: str) -> None:
    """Change the files of a version, as an attacker would."""
    match how:
        case "weights":
            save_file({"weight": np.zeros((3, 2))}, folder / "model.safetensors")
        case "one bit":
            content = bytearray((folder / "model.safetensors").read_bytes())
            content[-1] ^= 1
            (folder / "model.safetensors").write_bytes(content)
        case "config":
            (folder / "config.yaml").write_text("model: {name: another}\n")
        case "certificate":
            said = json.loads((folder / "certificate.json").read_text())
            (folder / "certificate.json").write_text(json.dumps(said | {"clean": 1.0}))
        case "a file more":
            (folder / "sitecustomize.txt").write_text("x")
        case "a file less":
            (folder / "config.yaml").unlink()
        case "a link":
            (folder / "config.yaml").rename(folder.parent / "elsewhere.yaml")
            (folder / "config.yaml").symlink_to(folder.parent / "elsewhere.yaml")
        case "weights and list":
            swap(folder, "weights")
            (folder / manifest.FILE).unlink()
            manifest.write(folder)
        case "the list":
            (folder / manifest.FILE).unlink()


SWAPS = ("weights", "one bit", "config", "certificate", "a file more", "a file less", "a link", "weights and list",
         "the list")  # fmt: skip


@pytest.mark.hostile
@pytest.mark.parametrize("how", mostly_slow(SWAPS, "one bit", "a link", "weights and list"))
def test_a_changed_cache_is_never_used(uri: str, tmp_path: Path, how: str) -> None:
    """Download, pull and NAME@ALIAS refuse it; an intact cache is verified and used again."""
    kept = browse.download("tiny@champion")
    assert browse.download("tiny/1") == kept
    swap(kept, how)
    for reference in ("tiny@champion", "tiny/1"):
        with pytest.raises(
            UserError, match=r"is not what was published as models:/tiny/1; remove .* and fetch it again"
        ):
            browse.download(reference)
    with pytest.raises(UserError, match="not what was published"):
        browse.pull("tiny", tmp_path / "to")
    assert not (tmp_path / "to").exists()
    shutil.rmtree(kept)
    assert browse.download("tiny/1") == kept


def stored(tmp_path: Path) -> Path:
    (weights,) = (tmp_path / "mlartifacts").rglob("model.safetensors")
    return weights.parent


@pytest.mark.hostile
@pytest.mark.parametrize(
    "how", mostly_slow((how for how in SWAPS if how != "a link"), "one bit", "a file more", "weights and list")
)  # the same bytes, after a copy
def test_a_changed_file_in_the_store_is_not_fetched(uri: str, tmp_path: Path, how: str) -> None:
    swap(stored(tmp_path), how)
    with pytest.raises(UserError, match="not what was published"):
        browse.download("tiny/1")
    assert not list((tmp_path / "cache").rglob("model.safetensors"))


@pytest.mark.hostile
@pytest.mark.parametrize("how", mostly_slow(SWAPS, "one bit", "a link", "weights and list"))
def test_mlflow_s_own_loader_refuses_it_too(
    uri: str, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`certify.served` verifies the files before it builds anything."""
    swap(stored(tmp_path), how)
    import mlflow

    monkeypatch.setattr(mlflow, "get_tracking_uri", lambda: uri)
    with pytest.raises(UserError, match="not what was published"):
        manifest.verify_loaded(stored(tmp_path))


def test_the_loader_of_published_versions_asks(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from certify import served

    asked: list[Path] = []
    monkeypatch.setattr(manifest, "verify_loaded", asked.append)
    with pytest.raises(UserError):
        served._load_pyfunc(str(tmp_path / "nothing"))
    assert asked == [tmp_path / "nothing"]


def test_a_version_that_lost_the_tag_of_its_files_is_not_fetched(uri: str) -> None:
    """Whoever may write tags and files could otherwise replace both."""
    store.connect(uri).delete_model_version_tag("tiny", "1", manifest.TAG)
    with pytest.raises(UserError, match="no tag files_sha256, so nothing binds its files"):
        browse.download("tiny/1")


def test_code_that_differs_from_that_which_published_is_named(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = browse.download("tiny/1")
    assert browse.find("tiny/1").tags[manifest.CODE] == manifest.code_sha256()
    with caplog.at_level(logging.WARNING, logger="registry"):
        manifest.verify_loaded(kept)
        assert "other code" not in caplog.text
        monkeypatch.setattr(manifest, "code_sha256", lambda: "0" * 64)
        manifest.verify_loaded(kept)
    assert "was published by other code" in caplog.text


def test_a_version_requires_no_package_name_that_others_may_register(uri: str, tmp_path: Path) -> None:
    root = stored(tmp_path).parents[1]
    for name in ("requirements.txt", "conda.yaml", "python_env.yaml", "MLmodel"):
        assert "certizoo" not in (root / name).read_text(), name
    assert all("==" in line for line in package.requirements())
    assert [line for line in package.requirements() if line.startswith("torch==")]


@pytest.mark.hostile
def test_figures_of_other_weights_are_not_written_onto_a_version(uri: str) -> None:
    with pytest.raises(UserError, match=r"models:/tiny/1 has weights .* were measured"):
        annotate("tiny/1", {"attacked_acc.quick.pgd": "1.0000"}, {"attacked_acc.quick.pgd": 1.0}, "0" * 64)
    assert "attacked_acc.quick.pgd" not in browse.find("tiny/1").tags
    own = browse.find("tiny/1").tags["weights_sha256"]
    assert annotate("tiny/1", {"attacked_acc.quick.pgd": "0.5"}, {}, own).tags["attacked_acc.quick.pgd"] == "0.5"


@pytest.mark.hostile
@pytest.mark.parametrize(
    "tag",
    mostly_slow(
        ("certified_acc.0.1", "clean_acc", "weights_sha256", "images", "champion_by", "files_sha256", "norm", "t"),
        *("certified_acc.0.1", "weights_sha256", "norm"),
    ),
)
def test_an_evaluation_writes_over_nothing_that_was_certified(uri: str, tag: str) -> None:
    before = browse.find("tiny/1").tags
    with pytest.raises(UserError, match=tag):
        annotate("tiny/1", {tag: "1.0"}, {}, before["weights_sha256"])
    assert browse.find("tiny/1").tags == before


@pytest.mark.hostile
@pytest.mark.parametrize(
    "tag",
    ["certified_acc.0.1", "certified_acc.linf.0.1", "Certified-Acc 0.1", "clean_acc", "CLEAN_ACC", "pgd_acc.0.1",
     "aa_acc.linf", "attacked_acc.quick.pgd", "proved_acc.x", "flags.quick", "weights_sha256", "method", "dataset",
     "norm", "images", "certified_low.0.1", "champion_by", "champion_images", "files_sha256", "certificate_sha256",
     "headline", "git_commit", "сertified_acc.0.1", "a\x1b[2Jb", "x" * 200],
)  # fmt: skip
def test_users_cannot_set_measured_tags(tag: str) -> None:
    with pytest.raises(UserError, match=r"registry\.tags: .* is (reserved|not a tag)"):
        version_tags.refuse_given({tag: "1.0"}, "registry.tags")


def test_tags_of_searches_and_people_are_welcome() -> None:
    version_tags.refuse_given(
        {"space": "msvp", "search": "s", "trial": "s/1", "param.penalty.lambda_q": "0.1", "team": 3}, "t"
    )


MARKUP = {
    "a closing tag": "[/val]",
    "a style": "[bold red]0.99[/]",
    "a link": "[link=http://evil]x[/link]",
    "an escape": "\x1b[2J\x1b]0;title\x07",
    "a reversal": "\u202e99.0",
    "a C1 control": "\x9b31m",
    "a line more": "a\n│ tiny │ 9 │ champion",
}


@pytest.mark.hostile
@pytest.mark.parametrize("case", mostly_slow(MARKUP, *list(MARKUP)[::4]))
def test_texts_of_the_registry_are_shown_without_effect(
    uri: str, case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """list, show and compare escape them for every reader."""
    text = MARKUP[case]
    client = store.connect(uri)
    for tag in ("attention", "method"):
        client.set_model_version_tag("tiny", "1", tag, text)
    client.update_model_version("tiny", "1", description=f"# {text}\n[here](http://evil.example) {text}\n<img src=x>")
    for arguments in (("list",), ("show", "tiny/1"), ("compare", "tiny/1", "tiny/1")):
        shown = run(monkeypatch, capsys, *arguments)
        assert not set(shown) & set("\x1b\x07\x9b\u202e")
        assert len([line for line in shown.splitlines() if line.startswith("│ tiny")]) <= 1, "no row of its own"
        if case in ("a closing tag", "a style", "a link") and arguments[0] != "list":
            assert text in shown


@pytest.mark.hostile
def test_a_link_of_a_description_is_no_link_of_the_terminal(uri: str) -> None:
    from io import StringIO

    from rich.console import Console

    from certizoo.registry import tables

    store.connect(uri).update_model_version("tiny", "1", description="[here](http://evil.example)")
    out = StringIO()
    Console(file=out, force_terminal=True, width=100).print(tables.card(browse.find("tiny/1")))
    assert "\x1b]8" not in out.getvalue()
    assert "http://evil.example" in out.getvalue(), "where it leads is seen"


@pytest.mark.hostile
@pytest.mark.parametrize("name", ["a'b", 'a" OR name = "b', "[val]"])
def test_names_registered_by_others_do_not_break_lists(
    uri: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store.connect(uri).create_registered_model(name)
    assert "tiny" in run(monkeypatch, capsys, "list")


@pytest.mark.hostile
@pytest.mark.parametrize("where", ["hand-over", "in a folder of it"])
def test_a_link_to_a_private_file_is_not_published(store_in: str, tmp_path: Path, where: str) -> None:
    folder = versions.certified(tmp_path / "a")
    (tmp_path / "private.txt").write_text("KEY")
    place = folder if where == "hand-over" else folder / "plots"
    place.mkdir(exist_ok=True)
    (place / "notes.txt").symlink_to(tmp_path / "private.txt")
    with pytest.raises(UserError, match="link to outside"):
        versions.issue(folder, store_in)
    assert not [path for path in tmp_path.rglob("notes.txt") if "mlartifacts" in path.parts]


# Publications happen once ---------------------------------------------------------------------------------------------


def test_a_slow_upload_and_a_second_writer_make_one_version(
    store_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial restarted on another machine: both upload and register, and one version stays."""
    slow, quick = versions.certified(tmp_path / "slow"), versions.certified(tmp_path / "quick")
    real, started, go_on = package.log_model, threading.Event(), threading.Event()

    def log_model(*arguments: Any, **named: Any) -> str:
        if threading.current_thread().name == "slow":
            started.set()
            go_on.wait(60)
        return real(*arguments, **named)

    monkeypatch.setattr(package, "log_model", log_model)
    made: list[Any] = []
    tags = {"trial": "s/1"}
    thread = threading.Thread(target=lambda: made.append(versions.issue(slow, store_in, tags=tags)), name="slow")
    thread.start()
    assert started.wait(60)
    made.append(versions.issue(quick, store_in, tags=tags))
    go_on.set()
    thread.join()
    assert {published.version for published in made} == {"1"}
    (version,) = browse.versions("tiny")
    assert version.aliases == ("champion", "champion-digits")


def test_a_request_that_mlflow_s_client_repeats_makes_one_version(
    store_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the first request was lost."""
    from mlflow import MlflowClient

    real = MlflowClient.create_model_version
    monkeypatch.setattr(MlflowClient, "create_model_version", lambda *a, **n: real(*a, **n) and real(*a, **n))
    assert versions.issue(versions.certified(tmp_path / "a"), store_in).version == "1"
    assert [v.version for v in browse.versions("tiny")] == ["1"]


CALLS = ("create_experiment", "create_run", "set_terminated", "create_logged_model", "log_model_artifacts",
         "finalize_logged_model", "log_outputs", "create_registered_model", "create_model_version",
         "set_model_version_tag", "set_registered_model_alias")  # fmt: skip
QUICK = ("create_model_version",)


def issue_and_die(folder: Path, uri: str, call: str, after: bool) -> None:
    """Publish in a process of its own, and get SIGKILL at this request."""
    from mlflow import MlflowClient

    real = getattr(MlflowClient, call)

    def die(*arguments: Any, **named: Any) -> None:
        if after:
            real(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(MlflowClient, call, die)
    versions.issue(folder, uri)


@pytest.fixture(scope="module")
def forked() -> ForkServerContext:
    """Start processes that have already imported MLflow, by forking one without threads.

    A fork of a process whose threads hold locks would inherit these locks, held for ever.
    """
    context = multiprocessing.get_context("forkserver")
    stores = [f"mlflow.store.{name}.sqlalchemy_store" for name in ("tracking", "model_registry")]
    context.set_forkserver_preload([*stores, "mlflow.pyfunc", "tests.certizoo.registry.test_hostile_versions"])
    return context


@pytest.mark.parametrize("after", mostly_slow((False, True), False), ids=("before", "after"))
@pytest.mark.parametrize("call", mostly_slow(CALLS, *QUICK))
def test_a_publication_killed_anywhere_is_finished_by_sync(
    store_in: str, tmp_path: Path, call: str, after: bool, forked: ForkServerContext
) -> None:
    """SIGKILL comes before and after each request that changes anything."""
    process = forked.Process(target=issue_and_die, args=(versions.certified(tmp_path / "run"), store_in, call, after))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    found = browse.versions(uri=store_in)
    assert all({"certified_acc.0.1", manifest.TAG, "headline", "weights_sha256"} <= set(v.tags) for v in found)
    published = publish.sync(tmp_path / "run", store_in)
    assert published is not None
    assert published.champion
    (version,) = browse.versions("tiny", store_in)
    assert version.aliases == ("champion", "champion-digits")
    runs = store.connect(store_in).search_runs([store.experiment_id(store.connect(store_in), "digits")])
    assert [run.info.status for run in runs] == ["FINISHED"]
    assert publish.sync(tmp_path / "run", store_in) is None


@pytest.mark.slow
def test_two_processes_that_publish_one_run_make_one_version(store_in: str, tmp_path: Path) -> None:
    versions.certified(tmp_path / "run")
    code = (
        "from pathlib import Path; from tests.tools import versions;"
        f"print(versions.issue(Path({str(tmp_path / 'run' / 'handover')!r}), {store_in!r}).version)"
    )
    root = Path(store.__file__).parents[2]
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    assert [process.communicate()[0].strip() for process in both] == ["1", "1"]
    assert len(browse.versions("tiny", store_in)) == 1
