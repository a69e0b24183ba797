"""The table in docs/results.md equals the leaderboard's files."""

from docs import results_table


def test_the_page_holds_what_the_files_say() -> None:
    (found,) = results_table.PLACE.findall(results_table.PAGE.read_text())
    assert found == results_table.markdown(), "python -m docs.results_table"


def test_every_entry_with_a_radius_has_its_row_and_the_best_comes_first() -> None:
    rows = [row for row in results_table.markdown().splitlines() if "`" in row]
    ranked = {f"`{entry.name}`": entry.certified("l2", results_table.HEADLINE) for entry in results_table.ranked()}
    names = [name for row in rows for name in ranked if name in row]
    assert sorted(names) == sorted(ranked)
    assert [ranked[name] for name in names] == sorted(ranked.values(), reverse=True)
    assert len(ranked) > 5


def test_a_row_of_fewer_images_says_so() -> None:
    rows = [row for row in results_table.markdown().splitlines() if "`cert_vit_c10_float32`" in row]
    assert len(rows) == 1
    assert "first 200 images | as served |" in rows[0]
