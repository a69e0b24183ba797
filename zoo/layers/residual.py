"""Weighted residual connections (LipsFormer, Qi et al. 2023): x + alpha * F(x), alpha learnable per channel.

    y = clamp(alpha, 0, bound) * x                                  (a factor before a branch; channels last)

The paper keeps alpha in a small range; the released code starts at 1 / L (L blocks) and has no bound. Here the bound is
part of the function, so that a proof can use it. A plain clamp gives no gradient to an alpha outside the range, which
then never returns. `bound * sigmoid` saturates and pulls towards bound / 2 under weight decay; the straight-through
clamp lets alpha drift away. Only the part of the gradient that would lead further out is therefore dropped: projected
gradient descent.
"""

from typing import Any

import torch
from torch import Tensor, nn

from certizoo import UserError
from zoo.bounds.contracts import Bound, Layer, Precision, Rounding
from zoo.bounds.curvature import affine
from zoo.bounds.hypotheses import Shapes
from zoo.bounds.primitives import factors
from zoo.bounds.rule_table import ModuleRules, NoRule, register


class _Projected(torch.autograd.Function):
    """clamp(alpha, 0, bound). A descent step -g that leads out of the range counts as 0; one that leads back passes."""

    @staticmethod
    def forward(alpha: Tensor, bound: float) -> Tensor:
        return alpha.clamp(0, bound)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        alpha, ctx.bound = inputs
        ctx.save_for_backward(alpha)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (alpha,), (g,) = ctx.saved_tensors, grads
        outwards = ((alpha >= ctx.bound) & (g < 0)) | ((alpha <= 0) & (g > 0))
        return g.masked_fill(outwards, 0), None


class WeightedResidual(nn.Module):
    """x (..., D) -> (..., D), each channel times its alpha in [0, bound].

    `init` is the first value of every alpha, in [0, bound] (the paper: 1 / number of blocks).
    """

    def __init__(self, dim: int, init: float = 1 / 12, bound: float = 1.0) -> None:
        super().__init__()
        if not 0 <= init <= bound:
            raise UserError(f"residual init {init:g} is not in [0, bound = {bound:g}]; change one of them")
        self.dim, self.init, self.bound = dim, init, bound
        self.alpha_D = nn.Parameter(torch.full((dim,), init))

    def weights_D(self) -> Tensor:
        """Return the clamped alpha."""
        alpha: Tensor = _Projected.apply(self.alpha_D, self.bound)
        return alpha

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights_D()

    def extra_repr(self) -> str:
        return f"{self.dim}, init={self.init:g}, bound={self.bound:g}"


def weighted_residual(module: WeightedResidual) -> Layer:
    """Return the rule of a diagonal map: max |alpha|. One channel would be broadcast to all, so it is refused."""
    gain = module.weights_D().detach().double().abs().max()

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        if x.shape[-1] != module.dim:
            raise NoRule(module, f"its {module.dim} weights would be broadcast over {x.shape[-1]} channels")
        return module(x), lambda r: gain * r

    return layer


def weighted_residual_shapes(module: WeightedResidual) -> Shapes:
    """Return one alpha per channel."""
    return {"alpha_D": (module.dim,)}


def weighted_rounding(module: WeightedResidual, precision: Precision) -> Rounding:
    """Bound one product per entry, with a rounded bound of alpha where that applies."""
    return factors(module.weights_D().detach().double(), 2, precision)


register(
    WeightedResidual,
    ModuleRules(rule=weighted_residual, expansion=affine, rounding=weighted_rounding, shapes=weighted_residual_shapes),
)
