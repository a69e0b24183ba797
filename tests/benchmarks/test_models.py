"""A part of the benchmark of common models: they are accepted, attacks fail, and a planted error is found."""

import json

import pytest
import torch
from torch import nn

import zoo
from benchmarks import bench_weights
from benchmarks.bench_models import Beaten, at_random, attacked, in_a_process, measured
from benchmarks.common_models import MODELS, TRAINED
from docs.generate import models_table, weights_table

REFUSED = ("timm `swin_tiny`", "torchvision `densenet121`")
SOME = (
    "own MLP",
    "own CNN with BatchNorm and MaxPool",
    "own ResNet of 3 blocks",
    "own ViT of `nn.TransformerEncoderLayer`",
    "torchvision `ConvNeXt`, 3 blocks",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_a_model_is_accepted_and_attacked_in_vain(name: str) -> None:
    row = measured(*at_random(MODELS[name]), budget=1e8)
    assert row["accepted"]
    assert row["method"] == "adjoint"
    assert row["median_radius"] > 0
    assert row["starts"] >= 8 * row["images"]


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_rules_says_what_is_missing(name: str) -> None:
    row = measured(*at_random(MODELS[name]))
    assert not row["accepted"]
    assert row["missing"]


def test_the_attack_beats_a_radius_that_is_too_large() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    images = torch.rand(2, 3, 2, 2)
    with torch.no_grad():
        logits = model(images)
    top, labels = logits.topk(2, -1)
    with pytest.raises(Beaten, match="has another class"):
        attacked(model, images, labels[:, 0], torch.full((2,), 5.0), 8, 8)
    weight = model.get_parameter("1.weight")
    apart = (weight[labels[:, 0]] - weight[labels[:, 1]]).norm(dim=1)
    radius_B = 0.3 * (top[:, 0] - top[:, 1]) / apart
    assert attacked(model, images, labels[:, 0], radius_B, 9, 8) == 18


def _one(name: str) -> dict[str, object]:
    return {"name": name}


def test_memory_is_that_of_a_process() -> None:
    row = in_a_process(_one, "a")
    assert row["name"] == "a"
    assert 10 < row["memory_MiB"] < 1e6


def test_the_table_of_the_docs_has_a_line_for_every_model_measured() -> None:
    found = models_table.markdown()
    rows = models_table.results()
    assert found.count("\n| ") == len(rows) + 1
    assert set(rows) <= {*MODELS, *TRAINED}
    assert "no radius was beaten" in found


def test_every_model_with_weights_is_measured_by_every_method() -> None:
    """The table in the FAQ has a line for each; a name that is added to the weights is missing here."""
    rows = json.loads(weights_table.FILE.read_text())["pairs"]
    assert list(rows) == [f"{name} {method}" for name in zoo.weights.entries() for method in bench_weights.METHODS]
    assert weights_table.markdown().count("\n| ") == len(rows) + 1


@pytest.mark.slow
def test_the_cheapest_pair_is_measured_again() -> None:
    row = bench_weights.row_of("cert_vit_c10 lofast")
    stored = json.loads(weights_table.FILE.read_text())["pairs"]["cert_vit_c10 lofast"]
    assert (row["parameters"], row["radius"]) == (stored["parameters"], stored["radius"])
