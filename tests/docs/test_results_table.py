"""The table in docs/results.md is that of the leaderboard's files."""

import json
from pathlib import Path

import pytest

from docs import results_table
from docs.generate.leaderboard import entries


def test_the_page_holds_what_the_files_say() -> None:
    (found,) = results_table.PLACE.findall(results_table.PAGE.read_text())
    assert found == results_table.markdown(), "python -m docs.results_table"


def test_every_entry_with_a_radius_has_its_rows_and_published_ones_their_soundness() -> None:
    rows = results_table.markdown().splitlines()
    ranked = results_table.ranked()
    for entry in entries():
        named = [row for row in rows if f"`{entry.name}`" in row]
        expected = 2 if entry.published else 1 + len(results_table.served(entry))
        assert len(named) == (expected if entry in ranked else 0)
    ranks = [e.headline("l2") for row in rows for e in ranked if row.startswith("| ") and f"`{e.name}`" in row]
    assert ranks == sorted(ranks, reverse=True)
    assert len(ranks) > 5


def test_a_certificate_of_the_served_model_is_a_row_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = {
        "served_dtype": "float32", "norm": "l2", "images": 200, "clean": 0.5,
        "accuracy": {"0.1411764705882353": {"certified": 0.4, "pgd": 0.45}},
    }  # fmt: skip
    (tmp_path / "cert_vit_c10_cifar10_served.json").write_text(json.dumps(result))
    monkeypatch.setattr(results_table, "RESULTS", tmp_path)
    rows = [row for row in results_table.markdown().splitlines() if "`cert_vit_c10`" in row]
    assert len(rows) == 2
    assert "first 200 images | float32 as served | 50.0 |" in rows[1]
    assert "40.0 (33.5 to 46.9) / 45.0" in rows[1]
