"""Ranges of a test set, processed apart and joined, give the rows of one run; ranges that differ are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from certify.evaluation import run as evaluation
from certify.evaluation.settings import Settings as Evaluation
from certify.rows import images
from certify.rows.images import Share
from certify.stage import register
from certify.stage import run as stage
from certizoo import UserError, shards
from tests.tools.cases import mostly_slow
from tests.tools.stage_runs import SETTINGS, data

ASKED = replace(SETTINGS, images=25, batch_size=10, eps=(0.01, 0.1), nonce="n")
EVALUATED = Evaluation(
    "two",
    {"pgd": {"kind": "pgd", "norm": "l2", "eps": 0.1, "steps": 3}},
    method="lofast",
    nonce="n",
    images=25,
    block=5,
    check_images=0,
)


def certified(handover: Path, digits: Path, out: Path, share: Share = images.WHOLE, **asked: Any) -> Path:
    stage.run(handover, data(digits), replace(ASKED, **asked), out, share=share)
    return out


def evaluated(handover: Path, digits: Path, out: Path, share: Share = images.WHOLE, **asked: Any) -> Path:
    evaluation.run(handover, data(digits), replace(EVALUATED, **asked), out, share=share)
    return out


def table(folder: Path) -> pd.DataFrame:
    (name,) = folder.glob("*.parquet")
    found = pd.read_parquet(name)
    return found.drop(columns=[column for column in found if "seconds" in str(column) or column == "served_difference"])


@pytest.mark.parametrize("work", mostly_slow((certified, evaluated), certified))
def test_ranges_joined_are_the_whole(work: Any, handover: Path, digits: Path, tmp_path: Path) -> None:
    """Two ranges join in any order, the rest is computed, and a second start takes no row twice."""
    whole = work(handover, digits, tmp_path / "whole")
    parts = (
        work(handover, digits, tmp_path / "a", images=10),
        work(handover, digits, tmp_path / "b", Share(10), images=10),
    )
    assert list(table(parts[1])["key"]) == list(table(whole)["key"][10:20])
    for _ in range(2):
        joined = work(handover, digits, tmp_path / "joined", Share(0, parts[::-1]))
        pd.testing.assert_frame_equal(table(joined), table(whole))
    expected, found = (json.loads((folder / "subject.json").read_text()) for folder in (whole, joined))
    assert found == expected


def test_a_joined_result_takes_the_nonce_of_its_parts(handover: Path, digits: Path, tmp_path: Path) -> None:
    part = certified(handover, digits, tmp_path / "a", nonce=None, images=10)
    joined = certified(handover, digits, tmp_path / "joined", Share(0, (part,)), nonce=None)
    assert len({json.loads((folder / "subject.json").read_text())["nonce"] for folder in (part, joined)}) == 1


def test_parts_that_do_not_fit_are_refused(handover: Path, digits: Path, tmp_path: Path) -> None:
    first = certified(handover, digits, tmp_path / "a", images=10)
    second = certified(handover, digits, tmp_path / "b", Share(10), images=10)
    other = certified(handover, digits, tmp_path / "other", Share(10), images=10, eps=(0.02, 0.1))
    begun = certified(handover, digits, tmp_path / "begun", images=10)
    lines = (begun / stage.ROWS).read_text().splitlines(keepends=True)
    (begun / stage.ROWS).write_text("".join(lines[:7]))
    forged = certified(handover, digits, tmp_path / "forged", images=10)
    (forged / stage.ROWS).write_text("".join([lines[1], lines[0], *lines[2:]]))
    for words, parts in {
        "begins with image 10": (second,),
        "another eps": (first, other),
        "7 rows of 10": (begun,),
        "line 1 is of image": (forged,),
        "No such file": (first, tmp_path / "nowhere"),
    }.items():
        with pytest.raises(UserError, match=words):
            certified(handover, digits, tmp_path / "joined", Share(0, parts))


def test_a_range_is_not_published(handover: Path, digits: Path, tmp_path: Path) -> None:
    out = certified(handover, digits, tmp_path / "b", Share(10), images=10)
    assert "test images 10 to 19" in (out / stage.REPORT).read_text()
    assert "first=10" in (out / stage.REPORT).read_text()
    with pytest.raises(UserError, match="range"):
        register.publish(handover, out, registered_name="x", experiment="x")


def test_a_range_beyond_the_images_or_between_blocks_is_refused(handover: Path, digits: Path, tmp_path: Path) -> None:
    samples = shards.find(data(digits), "test").samples
    with pytest.raises(UserError, match=f"has {samples} test images"):
        certified(handover, digits, tmp_path / "out", Share(samples))
    with pytest.raises(UserError, match="multiple"):
        evaluated(handover, digits, tmp_path / "out", Share(7))
    with pytest.raises(UserError, match="first=-1"):
        Share(-1)
