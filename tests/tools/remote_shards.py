"""A toy set of shards, and training batches read from it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from certizoo import UserError, shards
from certizoo.shards import DataConfig

SIZE = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("toy")
    images = np.random.default_rng(0).integers(0, 256, (90, SIZE, SIZE, 3), dtype=np.uint8)
    source = [(image, number % 7) for number, image in enumerate(images)]
    shards.write(source, root, name="toy", split="train", per_shard=20, class_names=[f"c{n}" for n in range(7)])
    return root


def config(root: str, **changes: object) -> DataConfig:
    base = DataConfig("toy", root, "toy-train-*.tar", "toy-train-*.tar", num_classes=7, img_size=SIZE, timeout=5)
    return replace(base, **changes)  # type: ignore[arg-type]


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        act()
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert ";" in message  # (what is wrong, how to fix it)
    return message


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def trained(data: DataConfig, **how: Any) -> Batches:
    found = shards.find(data, "train")
    return list(shards.train_loader(found, data, batch_size=8, epoch=1, seed=3, rank=1, world_size=2, **how))


def same(first: Batches, second: Batches) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True)
    )
