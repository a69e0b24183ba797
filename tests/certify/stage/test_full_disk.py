"""A disk that fills at any moment gives one line and whole files, and the same command then reaches the same result."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from certify.evaluation import run as evaluation
from certify.papers import analysis, feature_report
from certify.rows import records
from certify.stage import run as stage
from certizoo import UserError
from certizoo.attacks import AttackConfig
from tests.tools.full_disk import full_disk
from tests.tools.stage_runs import data

FEW = stage.Settings(
    method="lofast",
    images=4,
    eps=(0.1,),
    batch_size=2,
    nonce="one",
    attack=AttackConfig(norm="l2", steps=1, loss="margin"),
)
PGD = {"pgd": {"kind": "pgd", "norm": "l2", "eps": 0.1, "steps": 1}}
ATTACKED = evaluation.Settings(
    "test", PGD, method="lofast", images=4, block=2, batch_size=2, check_images=0, nonce="one"
)
FEATURES = feature_report.Settings(images=10, perplexity=3, batch_size=10, attack=replace(FEW.attack, eps=0.1))
ANALYSIS = analysis.Settings(images=1, attention_images=1, eps=(0.1,), input_scales=(1.0,), samples=1)
Run = Callable[[Path, Path, Path], object]
RUNS: dict[str, Run] = {
    "stage": lambda handover, digits, out: stage.run(handover, data(digits), FEW, out),
    "evaluation": lambda handover, digits, out: evaluation.run(handover, data(digits), ATTACKED, out),
    "features": lambda handover, digits, out: feature_report.run(handover, None, data(digits), FEATURES, out),
    "analyse": lambda handover, digits, out: analysis.run(handover, data(digits), ANALYSIS, out),
}
STEPS = {"features": 4, "analyse": 11}  # use every N-th moment


def without_times(value: Any) -> Any:
    """Drop the fields in which two starts may differ."""
    if isinstance(value, dict):
        words = ("seconds", "difference", records.DIGESTS)
        return {k: without_times(v) for k, v in value.items() if not any(word in k for word in words)}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def documents(out: Path) -> dict[str, Any]:
    """Return every JSON file below `out`, checking that all are whole."""
    return {path.name: without_times(json.loads(path.read_text())) for path in sorted(out.rglob("*.json"))}


def tables(out: Path) -> dict[str, pd.DataFrame]:
    """Return the parquet files without columns that depend on the clock or the batch of a row."""
    return {
        path.name: pd.read_parquet(path).filter(regex="^(?!seconds|served_difference)")
        for path in sorted(out.rglob("*.parquet"))
    }


def require_whole(out: Path) -> None:
    assert not list(out.rglob("*.part"))
    documents(out), tables(out)
    for path in out.rglob("*.png"):
        assert path.read_bytes().endswith(b"IEND\xaeB`\x82"), path
    for path in out.rglob("*.html"):
        assert path.read_text().rstrip().endswith("</html>"), path


def require_same(out: Path, expected: Path) -> None:
    require_whole(out)
    pd.testing.assert_series_equal(pd.Series(documents(out)), pd.Series(documents(expected)), rtol=1e-5)
    for name, table in tables(expected).items():
        pd.testing.assert_frame_equal(tables(out)[name], table, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "room"),
    [(name, room) for name in RUNS for room in (0, 300)],
)
@pytest.mark.slow
def test_every_write_may_fail(name: str, room: int, handover: Path, digits: Path, tmp_path: Path) -> None:
    """Fill the disk at the first moment, the second, and so on, until the run ends before the disk is full.

    After the moments in the middle a start without a fault completes the result of an undisturbed run.
    """
    run, expected = RUNS[name], tmp_path / "expected"
    run(handover, digits, expected)
    for after in count(step=STEPS.get(name, 1)):
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        refused = ""
        with full_disk(out, after, room) as disk:
            try:
                run(handover, digits, out)
            except UserError as error:
                refused = str(error)
        require_whole(out)
        if not disk.full:
            break
        assert refused or room or after > len(disk.seen) - 5, disk.seen[after:]  # everything is written by then
        assert not refused or ("make room there" in refused and "\n" not in refused)
        if after % 4 == 0:
            run(handover, digits, out)
            require_same(out, expected)
    assert after > 8
    require_same(out, expected)
