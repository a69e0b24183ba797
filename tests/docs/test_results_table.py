"""The table in docs/results.md equals the leaderboard's files."""

from docs import results_table
from docs.generate.leaderboard import entries


def test_the_page_holds_what_the_files_say() -> None:
    (found,) = results_table.PLACE.findall(results_table.PAGE.read_text())
    assert found == results_table.markdown(), "python -m docs.results_table"


def test_every_entry_of_the_data_set_has_its_row_and_its_soundness() -> None:
    rows = results_table.markdown().splitlines()
    for entry in entries():
        named = [row for row in rows if f"`{entry.name}`" in row]
        assert len(named) == (2 if entry.text("dataset") == results_table.DATASET else 0)
    ranks = [e.headline("l2") for row in rows for e in entries() if row.startswith("| ") and f"`{e.name}`" in row]
    assert ranks == sorted(ranks, reverse=True)
    assert len(ranks) > 5
