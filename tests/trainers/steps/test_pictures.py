"""The plots at the end of a run, from a real hand-over; system metrics through MLflow's monitors."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import zoo
from certizoo.config.compose import compose_config
from certizoo.registry.tracking.system import PREFIX, SystemMetrics
from tests.tools.launching import TINY
from trainers.job.prepare import prepare
from trainers.steps import pictures


def test_both_pictures_are_drawn(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(digits, tmp_path / "data" / "digits")
    monkeypatch.chdir(tmp_path)
    job = prepare(compose_config("adv_train", [*TINY, "name=drawn"]))
    model = zoo.create_model(**job.model)
    zoo.handover.save(tmp_path / "handover", model, job.model, {})
    job.run_dir.mkdir(parents=True)
    folder = pictures.draw(job, tmp_path / "handover", torch.device("cpu"))
    assert sorted(path.name for path in folder.iterdir()) == ["adversarial.png", "sigma_max.png"]
    for path in folder.iterdir():
        pixels = np.asarray(Image.open(path).convert("L"))
        assert min(pixels.shape) > 300
        assert pixels.std() > 10, "not blank"


def test_norms_are_those_of_every_layer() -> None:
    """Compare with the singular values, branch by branch."""
    options: dict[str, Any] = {"embed_dim": 32, "depth": 3, "num_heads": 2, "img_size": 8, "patch_size": 4}
    model = zoo.create_model("dp_vit_ti", num_classes=10, in_chans=1, **options)
    norms = pictures.sigma_max(model)
    assert {branch: len(values) for branch, values in norms.items()} == {"q": 3, "k": 3, "v": 3, "o": 3, "mlp": 6}
    out = [block.attn.proj.weight for block in model.blocks]  # type: ignore[union-attr]
    exact = [torch.linalg.matrix_norm(weight, ord=2).item() for weight in out]
    assert norms["o"] == pytest.approx(exact, rel=0.02)
    assert all(estimate <= truth * (1 + 1e-5) for estimate, truth in zip(norms["o"], exact, strict=True))


def test_differences_are_shown_around_gray() -> None:
    x = torch.full((1, 1, 2, 2), 0.5)
    attacked = x + torch.tensor([[0.0, 0.01], [-0.02, 0.3]])
    assert pictures.difference(x, attacked).flatten().tolist() == pytest.approx([0.5, 0.6, 0.3, 1.0])


def test_the_systems_numbers() -> None:
    first, second = (SystemMetrics().read() for _ in range(2))
    assert all(name.startswith(PREFIX) for name in first)
    assert {f"{PREFIX}cpu_utilization_percentage", f"{PREFIX}system_memory_usage_megabytes"} <= first.keys()
    assert first.keys() == second.keys()
    assert 0 < first[f"{PREFIX}system_memory_usage_percentage"] < 100
