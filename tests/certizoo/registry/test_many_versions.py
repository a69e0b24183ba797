"""A registry of many versions: what a command reads does not grow with them, and it answers as one that reads all."""

import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mlflow.store.model_registry.dbmodels.models import SqlModelVersion
from sqlalchemy import event
from sqlalchemy.engine import Engine

from certizoo.registry import browse
from certizoo.registry.listing import listed
from certizoo.registry.select import select
from certizoo.registry.server import store
from certizoo.registry.tracking import runs
from certizoo.registry.versions import publish
from tests.tools import versions
from tests.tools.many_versions import multiply
from tests.tools.versions import HEADLINE

FEW, MANY, SHOWN = 110, 400, 5  # FEW is more than a page
ROOT = Path(store.__file__).parents[2]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Callable[[Path, int], str]:
    """Return a function that makes a registry of so many versions of `tiny` in a folder, the first of them champion."""
    origin = tmp_path_factory.mktemp("origin")
    shutil.copy(empty_database, origin)
    issue(origin / "run0", f"sqlite:///{origin}/mlflow.db", 0.45)

    def made(folder: Path, count: int) -> str:
        folder.mkdir(exist_ok=True)
        shutil.copy(origin / "mlflow.db", folder)
        multiply(folder / "mlflow.db", "tiny", count)
        return f"sqlite:///{folder}/mlflow.db"

    return made


def issue(run_dir: Path, uri: str, share: float) -> publish.Published:
    metrics, tags = {HEADLINE: share}, {"trial": f"s/{run_dir.name}"}
    return versions.issue(versions.certified(run_dir, share), uri, metrics=metrics, tags=tags)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the statements that reach the database, and the versions that come back."""
    seen: Counter[str] = Counter()
    events = {"statements": (Engine, "before_cursor_execute"), "versions": (SqlModelVersion, "load")}
    listeners = {key: lambda *_, key=key: seen.update([key]) for key in events}
    for key, (target, name) in events.items():
        event.listen(target, name, listeners[key])
    try:
        yield seen
    finally:
        for key, (target, name) in events.items():
            event.remove(target, name, listeners[key])


def work(uri: str, folder: Path) -> dict[str, Counter[str]]:
    """Return the counts of every command; the later ones publish a version that loses, and one that wins."""
    commands: dict[str, Callable[[], object]] = {
        "find": lambda: browse.find("tiny/7", uri),
        "champion": lambda: browse.find("tiny@champion", uri),
        "list": lambda: listed("tiny", (), None, SHOWN, uri),
        "best": lambda: listed("tiny", (), HEADLINE, SHOWN, uri),
        "where": lambda: listed("tiny", ["trial=copy/9"], None, SHOWN, uri),
        "holder": lambda: listed(None, ["alias=champion"], None, SHOWN, uri),
        "loses": lambda: issue(folder / "loses", uri, 0.3),
        "wins": lambda: issue(folder / "wins", uri, 0.9),
    }
    found = {}
    for name, command in commands.items():
        with counted() as found[name]:
            command()
    return found


def test_no_command_reads_more_of_a_larger_registry(registry: Callable[[Path, int], str], tmp_path: Path) -> None:
    """MLflow itself walks all versions when it sets an alias or a tag, so a version that wins reads more."""
    folders = {count: tmp_path / str(count) for count in (FEW, MANY)}
    few, many = (work(registry(folder, count), folder) for count, folder in folders.items())
    assert few.pop("wins")["statements"] == many.pop("wins")["statements"]
    assert few == many
    assert max(many[name]["versions"] for name in ("find", "champion", "loses")) < 20
    assert browse.find("tiny@champion-digits", f"sqlite:///{tmp_path}/{MANY}/mlflow.db").version == str(MANY + 2)


@pytest.fixture(scope="module")
def whole(
    registry: Callable[[Path, int], str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[browse.Version]]:
    """Return a registry and all of its versions."""
    uri = registry(tmp_path_factory.mktemp("whole"), FEW)
    return uri, browse.versions("tiny", uri)


@pytest.mark.parametrize("sort", [HEADLINE, "certified_acc.0.1002", "certified_low.0.1", "trial", None])
@pytest.mark.parametrize("where", [[], ["trial!=copy/9", f"{HEADLINE}<=0.2"], ["trial=copy/9"], ["dataset=digits"]])
def test_the_list_is_the_head_of_all(
    whole: tuple[str, list[browse.Version]], where: list[str], sort: str | None
) -> None:
    uri, found = whole
    shown, more = listed("tiny", where, sort, SHOWN, uri)
    everything = select(found, where, sort)
    assert shown == everything[:SHOWN]
    assert more == (len(everything) > SHOWN)


def test_after_its_champion_is_deleted_the_best_of_all_is_elected(
    registry: Callable[[Path, int], str], tmp_path: Path
) -> None:
    """None of them has the tag of a champion."""
    uri = registry(tmp_path, 30)
    best = select(browse.versions("tiny", uri), sort=HEADLINE)[1]
    store.connect(uri).delete_model_version("tiny", "1")
    assert not issue(tmp_path / "run", uri, 0.09).champion
    assert browse.find("tiny@champion", uri).version == best.version


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_publishers_in_a_registry_of_2000_versions(registry: Callable[[Path, int], str], tmp_path: Path) -> None:
    """They take about as long as in one of 10, and leave the right champion."""
    seconds = {}
    for count in (10, 2000):
        folder = tmp_path / str(count)
        uri, start = registry(folder, count), time.monotonic()
        command = [sys.executable, "-m", "tests.tools.registry_writer", uri]
        both = [subprocess.Popen([*command, str(folder / name), "10", "10", "tiny"], cwd=ROOT) for name in "ab"]
        assert [process.wait(500) for process in both] == [0, 0]
        seconds[count] = time.monotonic() - start
        for run in [path for path in folder.glob("*/run-*") if runs.waiting(path) or publish.waiting(path)]:
            publish.sync(run, uri)
        found = browse.versions("tiny", uri)
        assert len(found) == count + 20
        best = max(found, key=lambda v: (float(v.tags["certified_low.0.1"]), -int(v.version)))
        assert best.aliases == ("champion", "champion-digits")
        assert [v.version for v in found if "champion_by" in v.tags] == [best.version]
    assert seconds[2000] < 1.5 * seconds[10], seconds
