"""A small teacher of digits."""

from pathlib import Path
from typing import Any

import torch

import zoo

SIZES: dict[str, Any] = {
    "embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 4, "img_size": 8, "in_chans": 1, "global_pool": "avg",
    "drop_path_rate": 0.3,
}  # fmt: skip


def save_teacher(folder: Path, seed: int = 7, **more: Any) -> None:
    """Write a hand-over of random weights; dropped paths would show that it is not in eval mode."""
    options = {"name": "dp_vit_ti", "num_classes": 10, **SIZES, **more}
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        zoo.handover.save(folder, zoo.create_model(**options), options, {"data": {"name": "digits"}})
