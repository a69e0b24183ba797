"""The table in docs/results.md equals the leaderboard's files."""

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
        assert len(named) == (1 + entry.published if entry in ranked else 0)
    ranks = [e.headline("l2") for row in rows for e in ranked if row.startswith("| ") and f"`{e.name}`" in row]
    assert ranks == sorted(ranks, reverse=True)
    assert len(ranks) > 5


def test_a_row_of_fewer_images_says_so() -> None:
    rows = [row for row in results_table.markdown().splitlines() if "`cert_vit_c10_float32`" in row]
    assert len(rows) == 1
    assert "first 200 images | float32 as served |" in rows[0]
