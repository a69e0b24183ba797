"""The champion is the best answer to one question, proved on enough images, or the version that was promoted."""

import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from certizoo import UserError
from certizoo.registry import browse
from certizoo.registry.__main__ import main
from certizoo.registry.server import store
from certizoo.registry.versions import champion
from certizoo.registry.versions.publish import Published
from tests.tools import versions
from tests.tools.cases import mostly_slow

Issue = Callable[..., Published]


@pytest.fixture
def issue(store_in: str, tmp_path: Path) -> Issue:
    def call(share: float, images: int = 500, eps: str = "0.1", tags: Any = None, **stated: Any) -> Published:
        number = len(list(tmp_path.glob("run*")))
        folder = versions.certified(tmp_path / f"run{number}", share, images, eps, **stated)
        return versions.issue(folder, store_in, eps, tags=tags or {})

    return call


def aliases() -> dict[str, str]:
    return {alias: v.version for v in browse.versions("tiny") for alias in v.aliases}


def test_it_moves_only_to_strictly_better_of_its_dataset(issue: Issue, tmp_path: Path) -> None:
    assert issue(0.40).champion
    assert not issue(0.40).champion  # a tie
    assert not issue(0.09).champion  # "0.09" < "0.40" as a number too
    assert aliases() == {"champion": "1", "champion-digits": "1"}
    assert issue(1.0).champion
    assert aliases() == {"champion": "4", "champion-digits": "4"}
    assert issue(0.2, dataset="cifar/10").champion  # the first version of its dataset
    assert aliases() == {"champion": "5", "champion-digits": "4", "champion-cifar_10": "5"}
    again = versions.issue(tmp_path / "run0" / "handover", None)
    assert not again.champion  # publishing it again changes nothing
    assert aliases() == {"champion": "5", "champion-digits": "4", "champion-cifar_10": "5"}
    assert browse.find("tiny/4").tags["champion_by"] == "rule"


NOT_ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "one image at a tiny eps": ({"share": 0.0, "images": 1, "eps": "0.001"}, "1 images are fewer"),
    "another eps": ({"share": 1.0, "eps": "0.001"}, "cannot be compared.*headline"),
    "another norm": ({"share": 1.0, "threat_model": {"norm": "linf"}}, "cannot be compared.*norm linf"),
    "other shards of that name": ({"share": 1.0, "data_digest": "f" * 64}, "cannot be compared.*data_digest ffff"),
    "few images": ({"share": 1.0, "images": 299}, "299 images are fewer than champion_images=300"),
    "few images, which it says are enough": ({"share": 1.0, "images": 50, "tags": {"champion_images": "50"}}, "beat"),
    "no bound": ({"share": 1.0, "tags": {"certified_low.0.1": "nan"}}, "tag certified_low"),
    "a bound above its share": ({"share": 0.9, "tags": {"certified_low.0.1": "1.0"}}, "above the share"),
    "nothing of its norm": ({"share": 1.0, "tags": {"norm": ""}}, "tag norm"),
    "a lucky few": ({"share": 0.97, "images": 300, "tags": {"certified_low.0.1": "0.9400"}}, "does not beat"),
}


@pytest.mark.hostile
@pytest.mark.parametrize("case", mostly_slow(NOT_ASKED, *list(NOT_ASKED)[::4]))
def test_a_version_without_comparable_figures_does_not_win(issue: Issue, case: str) -> None:
    """The competitor has 95 % on 500 images."""
    assert issue(0.95, tags={"certified_low.0.1": "0.9400"}).champion
    given, why = NOT_ASKED[case]
    try:
        published = issue(**given)
        assert not published.champion
        said = published.why
    except UserError as error:
        said = str(error)
    assert re.search(why, said), said
    assert aliases() == {"champion": "1", "champion-digits": "1"}


def test_a_first_champion_of_few_images_yields_to_any_of_enough(issue: Issue) -> None:
    few = {"champion_images": "20"}
    assert not issue(0.9, images=20).champion, "300 are wanted where nothing is said"
    assert issue(0.9, images=20, tags=few).champion
    assert not issue(0.5, images=20, tags=few).champion
    assert issue(0.3).champion
    assert not issue(1.0, images=20, tags=few).champion


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["registry", *arguments])
    main()


def test_a_hand_says_force_against_the_rule_and_is_told_what_it_overrides(
    issue: Issue, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    issue(0.6)
    issue(0.5)
    with pytest.raises(SystemExit):
        run(monkeypatch, "promote", "tiny/2")
    said = capsys.readouterr().err
    assert "0.5000" in said
    assert "tiny/1 (certified_acc.0.1 0.6000" in said
    assert "--force" in said
    assert aliases() == {"champion": "1", "champion-digits": "1"}
    with caplog.at_level(logging.WARNING):
        run(monkeypatch, "promote", "tiny/2", "--force")
    assert "against the rule" in caplog.text
    assert capsys.readouterr().out == "tiny/2 is @champion @champion-digits\n"
    assert browse.find("tiny/2").tags["champion_by"] == "hand"


def test_the_rule_keeps_a_manual_promotion_until_the_next_one(issue: Issue, monkeypatch: pytest.MonkeyPatch) -> None:
    issue(0.6)
    issue(0.5)
    run(monkeypatch, "promote", "tiny/2", "--force")
    better = issue(0.9)
    assert not better.champion
    assert "promoted by hand" in better.why
    assert not issue(0.99, dataset="cifar10").champion or aliases()["champion"] == "2"
    assert aliases()["champion"] == aliases()["champion-digits"] == "2"
    run(monkeypatch, "promote", "tiny/3")
    assert browse.find("tiny/3").tags["champion_by"] == "rule"
    assert issue(0.95).champion


def test_a_change_of_question_is_a_person_s(issue: Issue, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a model's headline eps changes, nothing is compared until someone promotes a version at the new one."""
    issue(0.6)
    changed = issue(0.3, eps="0.2")
    assert not changed.champion
    assert "headline certified_acc.0.2 instead of certified_acc.0.1" in changed.why
    run(monkeypatch, "promote", "tiny/2", "--force")
    assert browse.find("tiny@champion").version == "2"
    assert not issue(0.9).champion


@pytest.mark.hostile
def test_an_alias_of_another_dataset_is_not_given(issue: Issue) -> None:
    issue(0.6)
    with pytest.raises(UserError, match="champion-cifar10 belongs to another dataset"):
        browse.promote("tiny/1", "champion-cifar10", force=True)


class Racing:
    """A registry in which `meanwhile` runs, as another process, while the first one moves its aliases."""

    def __init__(self, scores: dict[str, float], meanwhile: Callable[["Racing"], None] = lambda _: None) -> None:
        self.tags = {version: self.facts(score) for version, score in scores.items()}
        self.aliases: dict[str, str] = {}
        self.meanwhile: list[Callable[[Racing], None]] = [meanwhile]

    @staticmethod
    def facts(score: float) -> dict[str, str]:
        asked = {"dataset": "d", "norm": "l2", "headline": "certified_acc.1", "data_digest": "x", "images": "500"}
        shares = {"certified_acc.1": str(score), "certified_low.1": str(score)}
        return asked | shares | {"weights_sha256": "w"}

    def search_model_versions(self, filter_string: str, **_: object) -> object:
        wanted = [v for v, tags in self.tags.items() if "champion_by" in tags or "LIKE" not in filter_string]
        return SearchResult([self.get_model_version("m", v) for v in wanted])

    def get_model_version(self, _: str, version: str) -> object:
        return SimpleNamespace(version=version, tags=dict(self.tags[version]))

    def get_model_version_by_alias(self, _: str, alias: str) -> object:
        if alias not in self.aliases:
            raise MlflowException("no such alias", INVALID_PARAMETER_VALUE)
        return self.get_model_version("m", self.aliases[alias])

    def set_model_version_tag(self, _: str, version: str, key: str, value: str) -> None:
        self.tags[version][key] = value

    def delete_model_version_tag(self, _: str, version: str, key: str) -> None:
        del self.tags[version][key]

    def set_registered_model_alias(self, _: str, alias: str, version: str) -> None:
        if self.meanwhile:
            self.meanwhile.pop()(self)
        self.aliases[alias] = version


class SearchResult(list[object]):
    token = None


def test_it_is_the_best_though_two_processes_crown_at_once() -> None:
    def another(registry: Racing) -> None:
        registry.tags["2"] = Racing.facts(0.6) | {"champion_by": "rule"}
        registry.aliases |= {"champion": "2", "champion-d": "2"}

    client = Racing({"1": 0.4}, another)
    assert not champion.elect_champion(client, "m", "1").is_champion  # type: ignore[arg-type]
    assert client.aliases == {"champion": "2", "champion-d": "2"}


RACES = {
    "PostgreSQL": ('(psycopg.errors.UniqueViolation) duplicate key value violates "model_version_tag_pk"', 2),
    "SQLite": ("(sqlite3.IntegrityError) UNIQUE constraint failed: registered_model_aliases.alias", 2),
    "another fault": ("no such version", 1),
}


@pytest.mark.parametrize("name", RACES)
def test_an_entry_that_another_process_has_just_made_is_set_again(name: str) -> None:
    said, times = RACES[name]
    calls = []

    def setter(*entry: str) -> None:
        calls.append(entry)
        if len(calls) == 1:
            raise MlflowException(said)

    if times == 2:
        store.put(setter, "vit", "1", "key", "value")
    else:
        with pytest.raises(MlflowException, match=said):
            store.put(setter, "vit", "1", "key", "value")
    assert calls == [("vit", "1", "key", "value")] * times


def test_of_two_equals_the_first_registered_takes_the_alias() -> None:
    """Both register before either takes the alias, which a worse version holds; the later one is faster."""
    client = Racing({"1": 0.3, "2": 0.6, "3": 0.6})
    client.aliases = {"champion": "1", "champion-d": "1"}
    assert champion.elect_champion(client, "m", "3").is_champion  # type: ignore[arg-type]
    assert champion.elect_champion(client, "m", "2").is_champion  # type: ignore[arg-type]
    assert not champion.elect_champion(client, "m", "3").is_champion  # type: ignore[arg-type]
    assert client.aliases == {"champion": "2", "champion-d": "2"}
    assert [version for version, tags in client.tags.items() if "champion_by" in tags] == ["2"]


def test_a_hand_that_promotes_while_the_rule_crowns_is_obeyed() -> None:
    def promoted(registry: Racing) -> None:
        registry.tags["1"]["champion_by"] = "hand"
        registry.aliases |= {"champion": "1", "champion-d": "1"}

    client = Racing({"1": 0.3, "2": 0.6}, promoted)
    assert not champion.elect_champion(client, "m", "2").is_champion  # type: ignore[arg-type]
    assert client.aliases == {"champion": "1", "champion-d": "1"}


def test_a_certificate_says_what_the_tags_say(issue: Issue, tmp_path: Path) -> None:
    """Otherwise a run folder could make any version a champion."""
    folder = versions.certified(tmp_path / "forged", 0.1)
    forged = {"certified_acc.0.1": "0.9900", "images": "10000", "dataset": "imagenet", "clean_acc": "1.0"}
    for tag, value in forged.items():
        with pytest.raises(UserError, match=f"its tag {tag} is {value}"):
            versions.issue(folder, None, tags={tag: value})
    said = json.loads((folder / "certificate.json").read_text())
    (folder / "certificate.json").write_text(json.dumps(said | {"weights_sha256": "0" * 64}))
    with pytest.raises(UserError, match="does not belong to the weights beside it"):
        versions.issue(folder, None)
