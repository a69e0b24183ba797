"""The whole chain on trained models and real images: certified <= AutoAttack <= PGD <= clean for every image."""

import json
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pytest
import torch

from certify.evaluation import run as evaluation
from certizoo.shards import DataConfig
from tests.tools.stage_runs import data

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
CERT_C10 = Path(__file__).parents[3] / "zoo" / "weights" / "cert_vit_c10"


def protocol(norm: str, eps: float) -> Mapping[str, Mapping[str, object]]:
    ball = {"norm": norm, "eps": eps}
    return {
        "pgd": {"kind": "pgd", **ball, "steps": 40, "loss": "margin"},
        "autoattack": {"kind": "autoattack", **ball},
    }


def check(handover: Path, images: DataConfig, settings: evaluation.Settings, out: Path) -> None:
    torch.set_num_threads(1)
    evaluation.run(handover, images, settings, out)
    table, summary = pd.read_parquet(out / evaluation.TABLE), json.loads((out / evaluation.EVALUATION).read_text())
    proved = table["certified.autoattack"]
    assert 0 < proved.mean() <= table["survives.autoattack"].mean() < table["correct"].mean(), "nothing to compare"
    assert (proved <= table["survives.autoattack"]).all()
    assert (table["survives.autoattack"] <= table["survives.pgd"]).all()
    assert (table["survives.pgd"] <= table["correct"]).all()
    assert summary["found_within_certified_radius"] == 0
    assert summary["flags"] == []


def test_digits(handover: Path, digits: Path, tmp_path: Path) -> None:
    settings = evaluation.Settings("slow", protocol("l2", 0.2), method="best", images=60, block=60, workers=2)
    check(handover, data(digits), settings, tmp_path)


def test_cifar10(real_data: Path, tmp_path: Path) -> None:
    """Evaluate the certified model that is stored with its results."""
    images = DataConfig("cifar10", str(real_data), "cifar10-train-*.tar", "cifar10-test-*.tar", 10, 32)
    settings = evaluation.Settings("slow", protocol("l2", 36 / 255), method="adjoint", images=20, block=10, workers=2)
    check(CERT_C10, images, settings, tmp_path)
