"""Shared fixtures: the hand-over of a small trained model."""

from pathlib import Path

import pytest
import torch

import zoo
from certizoo import shards


@pytest.fixture(scope="session")
def handover(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """Train a model for a few seconds, so that some of its images are correct and certified."""
    from tests.tools.stage_runs import CONFIG, data

    torch.manual_seed(0)
    model = zoo.create_model(**CONFIG).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = data(digits)
    train = shards.find(config, "train")
    for epoch in range(8):
        for images, labels in shards.train_loader(train, config, batch_size=128, epoch=epoch, seed=0):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    folder = tmp_path_factory.mktemp("run") / "handover"
    extra = {"data": vars(config), "penalty": {"lambda_q": 1e-4}, "seed": 0, "git_commit": "abc"}
    zoo.handover.save(folder, model, CONFIG, extra)
    return folder
