"""Certificates during training: the stage's figures on the last test images, without an effect on the run."""

import json
from pathlib import Path
from typing import Any

import pytest

from certizoo import shards
from tests.tools.launching import ROOT, TINY, finish, launch, rows
from trainers.steps import certify_probe


def test_images_are_the_last_ones(digits: Path) -> None:
    data = shards.DataConfig("digits", str(digits), "digits-train-*.tar", "digits-test-*.tar", 10, 8, 1)
    test_set = shards.find(data, "test")
    whole = [key for keys, _, _ in shards.eval_loader(test_set, data, batch_size=50) for key in keys]
    job: Any = type("Job", (), {"test_set": test_set, "data": data})
    assert [key for keys, _, _ in certify_probe.last_images(job, 20) for key in keys] == whole[-20:]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 0), (2, 2)])
def test_a_probe_leaves_no_trace_in_the_run(ranks: int, stage: int, digits: Path, tmp_path: Path) -> None:
    """Every second epoch ends with figures; losses and accuracies equal those of a run without them."""
    common = (*TINY, f"data.root={digits}", "train.epochs=4", "train.eval_images=16", "train.log_every=1",
              f"deepspeed=zero{stage}", "certify.images=4", "data.workers=0")  # fmt: skip
    looking = ("certify.enabled=true", "certify.method=lofast_local", "certify.eps=[0.001,0.1]",
               "certify.headline_eps=0.1", "train.certify_eps=[0.001,0.1]", "train.certify_images=12",
               "train.certify_every=2")  # fmt: skip
    for name, more in (("looking", looking), ("not", ())):
        script, size = ROOT / "trainers" / "adv_train.py", {"LOCAL_SIZE": str(ranks)}
        status, output = finish(launch(script, *common, *more, f"name={name}", cwd=tmp_path, more=size))
        assert status == 0, output
    found, plain = rows(tmp_path / "runs" / "looking"), rows(tmp_path / "runs" / "not")
    seen = [row for row in found if "certified_acc.0.1" in row]
    assert [row["epoch"] for row in seen] == [1, 3]
    for row in seen:
        assert row["certified_images"] == 12
        assert row["certified_acc.0.1"] <= row["certified_acc.0.001"] <= row["pgd_acc.0.001"]
    kept = ("step", "epoch", "loss", "msvp", "clean_acc", "pgd_acc")
    assert [{key: row.get(key) for key in kept} for row in found] == [
        {key: row.get(key) for key in kept} for row in plain
    ]
    metrics = json.loads((tmp_path / "runs" / "looking" / "handover" / "metrics.json").read_text())
    assert metrics["certified_acc.0.1"] == seen[-1]["certified_acc.0.1"]
