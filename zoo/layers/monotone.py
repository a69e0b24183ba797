"""A shifted and scaled GELU with slopes in [0, 1], (GELU(z) + a z) / b, for layers that need such slopes.

SLL is one of them (docs/references.md#erratum-sll-gelu).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.bounds.activations import Smooth
from zoo.bounds.elementwise import scalar
from zoo.bounds.rule_table import register
from zoo.bounds.torch_modules import GELU

LIFT = 0.12890415  # a >= -min GELU' = 0.128904145...
SHRINK = 1.2578083  # b >= max GELU' + a


class MonotoneGELU(nn.Module):
    """(GELU(z) + 0.12890415 z) / 1.2578083, element-wise, slopes in [0, 1]. Proof: docs/proofs.md#monotone-gelu."""

    def forward(self, z: Tensor) -> Tensor:
        return (F.gelu(z) + LIFT * z) / SHRINK


assert GELU.slopes[0] + LIFT >= 0
assert GELU.slopes[1] + LIFT <= SHRINK
MONOTONE_GELU = Smooth(
    lambda z: (GELU.slope(z) + LIFT) / SHRINK,
    lambda z: GELU.second(z) / SHRINK,
    tuple((at, value / SHRINK * (1 + 1e-12)) for at, value in GELU.extrema),
    (0.0, 1.0),
    operations=4,
    steepest=GELU.steepest / SHRINK * (1 + 1e-12),
    most_fourth=GELU.most_fourth / SHRINK * (1 + 1e-12),
)
register(MonotoneGELU, scalar(lambda module: MONOTONE_GELU))
