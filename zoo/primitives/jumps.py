"""The jump of torch's softplus: what it is short of log(1 + e^{b x}) / b beyond its threshold, where it returns x.

    j(x) = -log(1 + e^{-b x}) / b  for b x > t, else 0,  |j| <= d = log(1 + e^{-t}) / b,  0 <= j' <= s = 1 / (1 + e^t)

An entry crosses the threshold only if it moves by its distance c_i from t / b, so at most n entries cross within r,
where n is the largest number of distances with sum c_i^2 <= r^2:

    |j(x + G) - j(x)| <= n^{1/2} d + s r,       |R| <= n^{1/2} d + 2 s r

A captured softplus with a threshold below 40 is the sum of one with 40, whose jump is below rounding, and of this.
Proof: docs/proofs.md#primitives.

Letters: B images.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.arithmetic import OUT, U, length, product
from zoo.bounds.contracts import Bound, Expand, Expansion, Layer
from zoo.bounds.rule_table import ModuleRules, NoRule, register

NO_JUMP = 40.0


class SoftplusJump(nn.Module):
    """Softplus with this threshold less softplus with the threshold 40, entry by entry."""

    def __init__(self, beta: float, threshold: float) -> None:
        super().__init__()
        self.beta, self.threshold = float(beta), float(threshold)

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x, self.beta, self.threshold) - F.softplus(x, self.beta, NO_JUMP)

    def extra_repr(self) -> str:
        return f"beta={self.beta:g}, threshold={self.threshold:g}"


def jump(module: SoftplusJump) -> Layer:
    """Return the jumps that the radius can reach, and the slope."""
    b, t = module.beta, module.threshold
    if not (b > 0 and 0 < t < NO_JUMP):
        raise NoRule(module, f"its beta is {b:g} and its threshold {t:g}; give beta > 0 and 0 < threshold < 40")
    most, slope = math.log1p(math.exp(-t)) / b * OUT, OUT / (1 + math.exp(t))

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        near = (x.flatten(1) - t / b).abs() - 8 * U * (t / b + x.flatten(1).abs())
        square_BN = near.clamp_min(0).square().sort(1).values.cumsum(1) / OUT

        def bound(r: Tensor) -> Tensor:
            crossing = (square_BN <= r.unsqueeze(-1).square()).sum(-1).to(x)
            return torch.where(r > 0, crossing.sqrt() * most + slope * r, 0.0) * OUT

        return module(x), bound

    return layer


def jump_expansion(module: SoftplusJump) -> Expand:
    """Expand with the slope at x, which is the whole change of an entry that stays above the threshold, nearly."""
    first, b = jump(module), module.beta
    steep = OUT / (1 + math.exp(module.threshold))

    def expand(x: Tensor) -> Expansion:
        y, bound = first(x)
        slope = torch.where(b * x > module.threshold, (-b * x).sigmoid(), 0.0)

        def beta(r: Tensor) -> Tensor:
            return bound(r) + steep * r

        def remainder(g: Tensor) -> Bound:
            length_CB = length(g.flatten(2))
            return lambda r: product(length_CB, beta(r))

        def times_j(v: Tensor) -> Tensor:
            return slope * v

        ones_B = x.new_ones(len(x))
        return Expansion(
            y=y,
            gain_B=steep * ones_B,
            beta=beta,
            remainder=remainder,
            pull=times_j,
            own_push=times_j,
            rounding_B=1e-12 * steep * ones_B,
        )

    return expand


register(SoftplusJump, ModuleRules(rule=jump, expansion=jump_expansion))
KINDS = (SoftplusJump,)
