"""Models with weights on a grid, to which offsets are added and removed exactly."""

from typing import Any

import torch

import zoo
from tests.tools.small_models import TINY

GRID = 2.0**-12  # weights are multiples of this, so adding and removing an offset of a power of 2 is exact
IMAGES = torch.rand(200, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double()
OPTIONS: dict[str, Any] = TINY | {"img_size": 8, "in_chans": 1, "num_classes": 4, "depth": 1, "global_pool": "avg"}
STANDARD: dict[str, Any] = {"norm": {"name": "layernorm", "eps": 1.0}, "mlp": "gelu", "block": "prenorm"}


def plain(**options: Any) -> Any:
    """Return a float64 model with weights on the grid, so small that certificates are close to the truth."""
    torch.manual_seed(3)
    model: Any = zoo.create_model(
        "dp_vit_ti", **(OPTIONS | STANDARD | {"mean": [0.5], "std": [0.5]} | options)
    ).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.5 * p.shape[-1] ** -0.5 if p.ndim > 1 else 0.1))
            p.copy_((p / GRID).round() * GRID)
        mean = model.eval()(IMAGES).mean(0)  # so that no class wins everywhere
        model.head.bias -= (mean / GRID).round() * GRID
    return model
