"""Combinations: what either method certifies, at the cost of the second only where the first leaves an image open."""

import pytest

from benchmarks.lofast_table2 import Answer, summary, with_combinations


def test_the_second_method_costs_nothing_where_the_first_certifies() -> None:
    proved = with_combinations({"lofast": Answer(True, 0.1), "crown": Answer(False, 6.0)})
    left_open = with_combinations({"lofast": Answer(False, 0.1), "crown": Answer(True, 6.0)})
    assert proved["lofast, then crown"] == Answer(True, 0.1)
    assert left_open["lofast, then crown"] == Answer(True, pytest.approx(6.1))  # type: ignore[arg-type]
    rows = {row["method"]: row for row in summary([proved, left_open], 0.05, images=4)}
    assert {method: row["certified"] for method, row in rows.items()} == {
        "lofast": 25.0, "crown": 25.0, "lofast, then crown": 50.0
    }  # fmt: skip
    assert rows["lofast, then crown"]["seconds"] == pytest.approx(3.1)
    assert rows["crown"]["seconds"] == pytest.approx(6.0)
