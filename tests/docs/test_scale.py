"""The page of scale on paper: its hours are products of the recorded factors, and counted bytes follow the formulas."""

from itertools import product
from typing import Any

import pytest

from docs.generate import scale
from docs.generate.made import filled

COUNTED = scale.recorded("communication_cpu")["rows"]
ROWS = [row for row in COUNTED if row["ranks"] > 1]


def test_the_hours_are_images_by_rate() -> None:
    rate = scale.BATCH / scale.step_seconds()
    assert scale.hours(3, 16) == pytest.approx(3 * scale.IMAGES / (16 * rate) / 3600)
    assert f"**{scale.hours(scale.recipe()['train']['epochs'], scale.RANKS):.2f}**" in scale.markdown()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"stage {row['stage']}, {row['ranks']} ranks")
def test_counted_bytes_follow_the_formula(row: dict[str, Any]) -> None:
    """Gradients pass both halves of an all-reduce below stage 3; stages 1 and 2 gather the weights besides."""
    halves = row["parameters_sent"] * row["ranks"] / (row["ranks"] - 1)
    assert halves == pytest.approx({0: 2, 1: 3, 2: 3, 3: 6}[row["stage"]], rel=0.02)


def test_every_stage_was_counted_on_every_number_of_ranks() -> None:
    assert [(row["stage"], row["ranks"]) for row in COUNTED] == list(product(range(4), (1, 2, 4, 8)))


def test_one_rank_sends_nothing() -> None:
    assert not any(row["parameters_sent"] for row in COUNTED if row["ranks"] == 1)


def test_cores_load_the_bytes_that_are_read() -> None:
    """Both factors are of images of one size."""
    rows = {factor.what: factor.value for factor in scale.training()}
    small = scale.recorded("loader_cpu")["mean_kilobytes"]
    bytes_of_a_core = scale.images_per_core() * small * 1e3
    cores, read = float(rows["cores that load for a node"]), float(rows["bytes read by a node"].removesuffix(" GB/s"))
    assert cores * bytes_of_a_core == pytest.approx(read * 1e9, rel=0.02)


def test_the_page_has_three_tables() -> None:
    page = filled("<!-- made at build: scale -->")
    assert page.count("\n| ---") == 3
    assert page.count("](../../benchmarks/results/") > 5
