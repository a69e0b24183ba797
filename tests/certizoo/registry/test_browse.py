"""The commands that browse the registry: order, conditions, comparison, aliases and copies, on a real local store."""

import csv
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from certizoo import UserError
from certizoo.registry import browse
from certizoo.registry.__main__ import main
from certizoo.registry.select import select
from tests.tools import versions

EPS = "0.141176"
CHAMPION = "champion champion-digits"
Command = Callable[..., str]


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> str:
    """Make four versions of two models on two datasets. The tags store the radius 36/255 as 0.141176."""
    folder = tmp_path_factory.mktemp("store")
    shutil.copy(empty_database, folder)
    uri = f"sqlite:///{folder}/mlflow.db"
    facts = [("a", "digits", 0.1), ("a", "digits", 0.9), ("b", "cifar10", 0.05), ("b", "cifar10", 0.3)]
    for index, (name, dataset, certified) in enumerate(facts):
        files = versions.certified(folder / f"run{index}", certified, eps=EPS, dataset=dataset)
        tags = {"trial": f"s/{index}"}
        versions.issue(files, uri, EPS, name=name, tags=tags, description=f"card {index}", experiment="e")
    return uri


@pytest.fixture
def command(uri: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.setenv("CERTIZOO_CACHE", str(tmp_path / "cache"))

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["registry", *arguments, "--uri", uri])
        main()
        return capsys.readouterr().out

    return run


def order(uri: str, *where: str, sort: str | None = None) -> list[str]:
    return [f"{v.name}/{v.version}" for v in select(browse.versions(uri=uri), where, sort)]


def test_sort_is_by_number_best_first_and_takes_the_radius_as_people_write_it(uri: str) -> None:
    assert order(uri, sort="certified_acc.0.141") == ["a/2", "b/2", "a/1", "b/1"]
    with pytest.raises(UserError, match=r"no version has 'certified_acc\.0\.15'; nearest: certified_acc"):
        order(uri, sort="certified_acc.0.15")


@pytest.mark.parametrize(
    ("where", "left"),
    [
        (["dataset=cifar10"], ["b/2", "b/1"]),
        (["dataset!=cifar10"], ["a/2", "a/1"]),
        (["certified_acc.0.141>=0.3"], ["a/2", "b/2"]),
        (["certified_acc.0.141<=0.3", "dataset=cifar10"], ["b/2", "b/1"]),
        (["certified_acc.0.141=0.05"], ["b/1"]),
        (["alias=champion"], ["a/2", "b/2"]),
        (["nothing=here"], []),
    ],
)
def test_conditions_must_all_hold(uri: str, where: list[str], left: list[str]) -> None:
    assert order(uri, *where) == left


@pytest.mark.parametrize("text", ["dataset", "=x", "certified_acc.0.141>=much"])
def test_a_condition_that_is_none_says_how_to_write_one(uri: str, text: str) -> None:
    with pytest.raises(UserError, match=r"KEY=VALUE|is not a number"):
        order(uri, text)


def test_list_as_the_readme_writes_it(command: Command) -> None:
    listed = command("list", "--sort", "certified_acc.0.141", "--where", "dataset=cifar10")
    assert listed.index("0.3000") < listed.index("0.0500")
    assert "digits" not in listed


@pytest.mark.parametrize("form", ["csv", "json"])
def test_a_list_for_other_programs_has_the_same_rows(form: str, command: Command) -> None:
    text = command("list", "a", "--format", form)
    rows = json.loads(text) if form == "json" else [*csv.DictReader(text.splitlines())]
    assert [(row["name"], row["version"], row["alias"]) for row in rows] == [("a", "2", CHAMPION), ("a", "1", "")]
    assert [float(row[f"certified_acc.{EPS}"]) for row in rows] == [0.9, 0.1]
    assert rows[0].keys() >= {"dataset", "attention", "clean"}


def test_a_list_of_nothing_has_its_columns(command: Command) -> None:
    nothing = ("list", "--where", "nothing=here")
    assert command(*nothing, "--format", "csv") == "name,version,alias,dataset,attention,penalty,method,clean\n"
    assert command(*nothing, "--format", "json") == "[]\n"
    assert "attention" in command(*nothing)


def test_show_and_compare(command: Command) -> None:
    assert "card 1" in command("show", "a/2")
    compared = command("compare", "a/1", "a/2", "b/2")
    (row,) = [line for line in compared.splitlines() if line.startswith("│ certified_acc")]
    assert [float(cell) for cell in row.split("│")[2:-1]] == [0.1, 0.9, 0.3]


def test_promote_and_pull(command: Command, uri: str, tmp_path: Path) -> None:
    assert command("promote", "a/1", "--alias", "served") == "a/1 is @served\n"
    assert browse.find("a@served", uri).version == "1"
    command("pull", "a@served", str(tmp_path / "copy"))
    assert json.loads((tmp_path / "copy" / "certificate.json").read_text())["run"] == "run0"
    with pytest.raises(SystemExit) as refused:
        command("pull", "a@served", str(tmp_path / "copy"))
    assert refused.value.code == 2


def test_a_trial_has_one_version_however_often_it_is_sent(uri: str, tmp_path: Path) -> None:
    """A trial restarted after its worker was lost has another run and another certificate (other seconds)."""
    files = versions.certified(tmp_path / "again", 0.9, eps=EPS)
    sent = versions.issue(files, uri, EPS, name="a", tags={"trial": "s/1"}, experiment="e")
    assert sent.version == "2"
    assert len(browse.versions("a", uri)) == 2
