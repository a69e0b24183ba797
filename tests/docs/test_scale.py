"""The page of scale on paper: its hours are products of the recorded factors, and counted bytes follow the formulas."""

import pytest

from docs.generate import scale
from docs.generate.made import filled

ROWS = scale.recorded("communication_cpu")["rows"]


def test_the_hours_are_images_by_rate() -> None:
    rate = scale.BATCH / scale.step_seconds()
    assert scale.hours(3, 16) == pytest.approx(3 * scale.IMAGES / (16 * rate) / 3600)
    assert f"**{scale.hours(scale.recipe()['train']['epochs'], scale.RANKS):.2f}**" in scale.markdown()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"stage {row['stage']}, {row['ranks']} ranks")
def test_counted_bytes_follow_the_formula(row: dict[str, float]) -> None:
    """Gradients and weights pass once each through half an all-reduce below stage 3, and weights more often in it."""
    halves = row["parameters_sent"] * row["ranks"] / (row["ranks"] - 1)
    assert halves == pytest.approx(2, rel=0.1) if row["stage"] < 3 else halves > 3


def test_the_page_has_four_tables() -> None:
    page = filled("<!-- made at build: scale -->")
    assert page.count("\n| ---") == 4
    assert page.count("](../../benchmarks/results/") > 5
