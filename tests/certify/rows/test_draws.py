"""The recorded source of a nonce survives restarts and joined ranges."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from certify.rows.draws import DRAWN, GIVEN, Nonce, nonce_of
from certizoo import UserError
from tests.tools.stage_runs import SUBJECT


def rows_with(folder: Path, said: Mapping[str, object]) -> Path:
    folder.mkdir()
    (folder / "subject.json").write_text(json.dumps({**SUBJECT, **said}))
    (folder / "rows.jsonl").write_text("{}\n")
    return folder / "rows.jsonl"


def test_a_new_result_draws_or_is_given(tmp_path: Path) -> None:
    drawn = [nonce_of(None, tmp_path / "rows.jsonl") for _ in range(2)]
    assert drawn[0].text != drawn[1].text
    assert {nonce.origin for nonce in drawn} == {DRAWN}
    assert nonce_of("n", tmp_path / "rows.jsonl") == Nonce("n", GIVEN)


def test_that_of_the_rows_stays_what_it_is(tmp_path: Path) -> None:
    """A nonce that a report's command passes again still counts as drawn by the run."""
    drawn = Nonce("n1", DRAWN)
    rows = rows_with(tmp_path / "a", drawn.said())
    assert nonce_of(None, rows) == nonce_of("n1", rows) == drawn
    assert nonce_of("n2", rows) == Nonce("n2", GIVEN)
    with pytest.raises(UserError, match=r"another version, as its nonce_origin is .*; remove .* and certify again"):
        nonce_of(None, rows_with(tmp_path / "b", {"nonce": "n1", "nonce_origin": None}))


def test_that_of_parts_is_taken_over(tmp_path: Path) -> None:
    """A nonce given for all ranges counts as given for the whole; one that the whole drew before stays drawn."""
    given = rows_with(tmp_path / "part", Nonce("n1", GIVEN).said()).parent
    assert nonce_of(None, tmp_path / "whole" / "rows.jsonl", [given]) == Nonce("n1", GIVEN)
    drawn = rows_with(tmp_path / "drawn", Nonce("n1", DRAWN).said())
    assert nonce_of(None, drawn, [given]) == Nonce("n1", DRAWN)
    assert nonce_of("n1", tmp_path / "other" / "rows.jsonl", [drawn.parent]) == Nonce("n1", GIVEN)
