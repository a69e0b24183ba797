"""Leaderboard files follow the schema, agree with our results, and do not contradict one another."""

import copy
import json
from pathlib import Path

import jsonschema
import pytest

from benchmarks import leaderboard
from certify.leaderboard import entry
from certizoo import UserError
from tests.tools.leaderboard_files import OURS, SCHEMA

FILES = sorted(path for path in leaderboard.LEADERBOARD.glob("*.json") if path.name != "schema.json")
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


@each_file
def test_every_entry_is_in_the_form_of_the_schema(path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(json.loads(path.read_text()), SCHEMA, jsonschema.Draft202012Validator)
    assert entry.read(path)["name"] == path.stem


@pytest.mark.parametrize("name", leaderboard.OURS)
def test_our_entries_are_what_the_results_say(name: str) -> None:
    """`python -m benchmarks.leaderboard` reproduces every entry from benchmarks/results, byte for byte."""
    assert (leaderboard.LEADERBOARD / f"{name}.json").read_text() == leaderboard.text(name)


@each_file
def test_an_entry_is_ours_or_published(path: Path) -> None:
    """Published figures name their source, and none of them counts as proved here."""
    said = json.loads(path.read_text())
    assert said["published"] == (path.stem not in leaderboard.OURS)
    if said["published"]:
        assert said["source"].startswith("https://")
        assert said["weights_sha256"] is said["command"] is None


def test_the_schema_and_the_reader_know_the_same_fields() -> None:
    kinds = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list, "null": type(None)}

    def types(said: dict) -> set[type]:
        words = [said["type"]] if isinstance(said["type"], str) else said["type"]
        return {kind for word in words for kind in ((int, float) if word == "number" else (kinds[word],))}

    assert {key: types(said) for key, said in SCHEMA["properties"].items()} == {
        key: set(kind) for key, kind in (entry.FIELDS | entry.PROVED).items()
    }
    point = SCHEMA["$defs"]["curve"]["additionalProperties"]["properties"]
    assert {key: types(said) for key, said in point.items()} == {key: set(kind) for key, kind in entry.POINT.items()}
    nonce = SCHEMA["properties"]["nonces"]["items"]
    assert set(nonce["required"]) == set(nonce["properties"]) == set(entry.NONCE)
    assert set(SCHEMA["required"]) == set(entry.FIELDS)
    assert set(SCHEMA["then"]["required"]) == set(entry.PROVED)


CHANGES = {
    "clean": (lambda e: e.update(clean=101), "clean is 101, not a percentage"),
    "below": (lambda e: e["curves"]["l2"]["0.1"].update(certified=59.0), r"more than 58.3|only 55.1"),
    "attack": (lambda e: e["curves"]["l2"]["0.25"].update(attacked=40.0), "43.3 certified and only 40.0"),
    "rising": (lambda e: e["curves"]["linf"]["0.00784314"].update(attacked=52.0), "more than 51.1"),
    "field": (lambda e: e.update(extra=1), "extra is unknown"),
    "missing": (lambda e: e.pop("method"), "method is missing"),
    "norm": (lambda e: e["curves"].update(l3={"1": {}}), "curves.l3 is not a curve"),
    "eps": (lambda e: e["curves"]["l2"].update({"-1": {}}), "is not a point at a radius above 0"),
    "type": (lambda e: e.update(published="no"), "published is 'no'"),
    "chance": (lambda e: e.update(failure_probability=2), "is '2', not a probability"),
    "nonce": (lambda e: e.update(nonces=["n1"]), r"nonces\.0 is 'n1'"),
    "no nonce": (lambda e: e.update(nonces=[]), "nonces is empty"),
    "no nonces": (lambda e: e.pop("nonces"), "nonces is missing"),
    "others' nonces": (lambda e: e.update(published=True), "failure_probability is unknown"),
    "origin": (lambda e: e.update(nonces=[{"nonce": "n1", "beacon": None}]), r"nonces\.0\.origin is missing"),
    "path": (lambda e: e.update(name="../x"), "not a valid folder name"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_entry_that_contradicts_itself_is_refused(change: str, tmp_path: Path) -> None:
    changed, (alter, words) = copy.deepcopy(OURS), CHANGES[change]
    alter(changed)
    (tmp_path / "x.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match=words):
        entry.read(tmp_path / "x.json")
