"""GELU between two lines of slope 0 and 1, for layers that ask for that (SLL; trap D14d): (GELU(z) + a z) / b."""

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.bounds.rules import GELU_SLOPE, rule, unit_slope

LIFT = 0.12890415  # a >= -min GELU' = 0.128904145...
SHRINK = 1.2578083  # b >= max GELU' + a


class MonotoneGELU(nn.Module):
    """Elementwise, with slopes in [0, 1]: (GELU(z) + 0.12890415 z) / 1.2578083. Source: MATH-PROOFS.md section 2.7."""

    def forward(self, z: Tensor) -> Tensor:
        return (F.gelu(z) + LIFT * z) / SHRINK


assert GELU_SLOPE["none"] - 1 <= LIFT
assert GELU_SLOPE["none"] + LIFT <= SHRINK
rule(MonotoneGELU)(unit_slope)
