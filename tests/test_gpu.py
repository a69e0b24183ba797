"""What is promised of a GPU: the answers of a CPU, and that the command trains there in bfloat16 (pytest -m gpu)."""

import json
from pathlib import Path

import pytest
import torch

from attacks import AttackConfig
from certify import certified_radius
from tests.tools.launching import ROOT, TINY, finish, launch
from tests.tools.small_models import PARTS, labelled, small_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]


@pytest.mark.parametrize("method", ["lofast", "adjoint", "best"])
@pytest.mark.parametrize("parts", PARTS)
def test_radii_are_those_of_a_cpu(parts: str, method: str) -> None:
    model = small_model(parts, 0)
    images, labels = labelled(model, 4, 0)
    here = certified_radius(model, images, labels, method, nonce="one")
    there = certified_radius(model.cuda(), images.cuda(), labels.cuda(), method, nonce="one").cpu()
    assert torch.allclose(here, there, rtol=1e-6, atol=0)


def test_an_attack_finds_what_it_finds_on_a_cpu() -> None:
    model = small_model("standard", 1)
    images, labels = labelled(model, 8, 1)
    attack = AttackConfig("l2", 0.5, steps=10, random_start=False)
    here, there = attack.run(model, images, labels), attack.run(model.cuda(), images.cuda(), labels.cuda()).cpu()
    assert (here - there).abs().max() <= 1e-3


def test_the_trainer_settles_for_bfloat16_and_ends(folder: Path) -> None:
    script = ROOT / "trainers" / "adv_train.py"
    gpu = {"CUDA_VISIBLE_DEVICES": "0", "DS_ACCELERATOR": "cuda", "LOCAL_SIZE": "1"}
    status, output = finish(launch(script, *TINY, "name=gpu", "train.max_steps=4", cwd=folder, more=gpu))
    assert status == 0, output
    assert "train.precision=bf16" in output
    rows = [json.loads(line) for line in (folder / "runs" / "gpu" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["loss"] < 10 for row in rows if "loss" in row)
