"""Token-wise networks: timm's MLP, and two 1-Lipschitz residual layers (SLL, constrained MLP), with their rules."""

import math
from collections.abc import Iterator
from typing import Any

import timm.layers
import torch
from timm.models import register_notrace_module
from torch import Tensor, nn

from zoo.arithmetic import OUT, U, gamma
from zoo.bounds.activations import activation_of
from zoo.bounds.contracts import Bound, Expand, Layer, Precision, Rounded, Rounding
from zoo.bounds.first_order import added, chain, layer_of
from zoo.bounds.fused import fused
from zoo.bounds.hypotheses import Shapes, power_vectors
from zoo.bounds.primitives import matrix_product
from zoo.bounds.rounding import TINY, composed, of_chain, residual_rounding, roundings_of, size
from zoo.bounds.rule_table import Links, ModuleRules, NoRule, expect, register
from zoo.layers.constrained import constrain_
from zoo.spectral import start_vectors

DIAGONAL = 1e-11  # largest relative error of the T of an SLL layer that second order accepts


class Mlp(timm.layers.Mlp):
    """timm's fc2(act(fc1 x)), which also stores the vectors of the MSVP penalty's power iteration."""

    power_fc1_1D: Tensor
    power_fc2_1D: Tensor

    def __init__(self, dim: int, hidden: int, **options: Any) -> None:
        super().__init__(dim, hidden, **options)
        self.register_buffer("power_fc1_1D", start_vectors(1, dim))
        self.register_buffer("power_fc2_1D", start_vectors(1, hidden))

    def spectral_terms(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the terms for `zoo.penalty`."""
        yield "mlp", self.fc1.weight[None], self.power_fc1_1D
        yield "mlp", self.fc2.weight[None], self.power_fc2_1D


class SLL(nn.Module):
    """SDP-based Lipschitz Layer, 1-Lipschitz, residual included.

        y = x - 2 W T^{-1} sigma(W^T x + b),    T_ii = sum_j |W^T W|_ij q_j / q_i.

    W (d, H), b (H,), q = exp(log_q) (H,); x (..., d) -> (..., d). Source: Araujo et al. 2023, Theorem 3. The bound
    holds only for activations with slopes in [0, 1], which GELU does not have (docs/references.md#erratum-sll-gelu).
    """

    def __init__(self, dim: int, hidden: int, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.dim, self.hidden = dim, hidden
        self.weight = nn.Parameter(torch.empty(dim, hidden))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.log_q = nn.Parameter(torch.zeros(hidden))
        self.act = act()
        nn.init.xavier_normal_(self.weight)

    def diagonal_H(self) -> Tensor:
        """Return T. An all-zero column of W has T_ii = 0 and no effect: the clamp only avoids 0 / 0."""
        q = self.log_q.exp()
        return (((self.weight.mT @ self.weight).abs() * q).sum(1) / q).clamp_min(1e-12)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(x @ self.weight + self.bias)
        return x - 2 * (hidden / self.diagonal_H()) @ self.weight.mT


@register_notrace_module  # it compares shapes
class ConstrainedMlp(nn.Module):
    """An MLP with its own residual, 1-Lipschitz if act has slopes in [0, 1].

        y = (x + f(x)) / 2,    f(x) = W_2 act(W_1 x + b_1) + b_2,    ||W_1|| <= 1, ||W_2|| <= 1.

    x (..., d) -> (..., d). `constraint` says how the norms are kept: 'aol', 'orthogonal' or 'cap' (constrained.py).
    """

    def __init__(
        self, dim: int, hidden: int, constraint: str = "aol", act: type[nn.Module] = nn.ReLU, bias: bool = True
    ) -> None:
        super().__init__()
        self.constraint = constraint
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden, bias=bias), act(), nn.Linear(hidden, dim, bias=bias)

    def finish_init(self) -> None:
        """Put the constraints on. The model calls this once its weights have their initial values."""
        constrain_(self.fc1, self.constraint)
        constrain_(self.fc2, self.constraint)

    def forward(self, x: Tensor) -> Tensor:
        return added(x, self.fc2(self.act(self.fc1(x)))) / 2


def sll(module: SLL) -> Layer:
    """Return the rule of SLL, which is 1-Lipschitz for slopes in [0, 1].

    0 <= W T^{-1} W^T <= I (T - W^T W is diagonally dominant after scaling by q), so slopes in [0, 1] give ||I - 2 W
    T^{-1} D W^T|| <= 1. The certificate's final slack covers the rounding of T. Proof: docs/proofs.md#sll.
    """
    least, most = activation_of(module.act).slopes
    if least < 0 or most > 1:
        raise NoRule(
            module, f"SLL is not 1-Lipschitz with {type(module.act).__name__}, whose slopes leave [0, 1]; use ReLU"
        )
    return lambda x: (module(x), lambda r: r)


def sll_shapes(module: SLL) -> Shapes:
    """Return the shapes of W, b and log q."""
    return {"weight": (module.dim, module.hidden), "bias": (module.hidden,), "log_q": (module.hidden,)}


def mlp_chain(module: Mlp) -> Links:
    """Return the links of fc2(sigma(fc1 x)). At first order this is the product of the three constants."""
    return module.fc1, module.act, module.drop1, module.norm, module.fc2, module.drop2


def constrained_mlp(module: ConstrainedMlp) -> Layer:
    """Return the rule (1 + ||W_2|| slope ||W_1||) / 2, measured: the constraints are not trusted."""
    branch = chain(layer_of(part) for part in (module.fc1, module.act, module.fc2))

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        y, bound = branch(x)
        return (x + y) / 2, lambda r: (r + bound(r)) / 2

    return layer


# second order ---------------------------------------------------------------------------------------------------------


def mlp_expansion(module: Mlp) -> Expand:
    """Expand W_2 sigma(W_1 x + b_1) + b_2 by one fused rule (docs/proofs.md#fused-mlp, ReLU docs/proofs.md#kinks)."""
    for part, kind in ((module.drop1, nn.Dropout), (module.norm, nn.Identity), (module.drop2, nn.Dropout)):
        expect(part, kind)
    w_1_HD, w_2_DH = _weights(module.fc1, module.fc2)
    return fused(module, activation_of(module.act), module.fc1, w_1_HD, w_2_DH)


def _weights(fc1: nn.Module, fc2: nn.Module) -> tuple[Tensor, Tensor]:
    expect(fc1, nn.Linear)
    expect(fc2, nn.Linear)
    return fc1.get_parameter("weight").detach().double(), fc2.get_parameter("weight").detach().double()


def sll_expansion(module: SLL) -> Expand:
    """Expand by the fused rule with W_1 = W^T and W_2 = -2 W T^{-1}, its units scaled by S = T^{-1/2}.

    Then ||W_2 S^{-1}|| <= 2 and ||S W_1|| <= 1. J = I + W_2 D W_1 with 0 <= D <= I has norm <= 1, as the first-order
    rule says (docs/proofs.md#sll).
    """
    w_DH, t_H = module.weight.detach().double(), module.diagonal_H().detach().double()
    off = _diagonal_error(module, gamma(sum(w_DH.shape) + 20) + 8 * U)
    if not off <= DIAGONAL:
        raise NoRule(
            module, f"its T is a sum that cancels, with a relative error of {off:.1g} in float64; use method=lofast"
        )

    def units(x: Tensor) -> Tensor:
        return x @ w_DH + module.bias.double()

    scales_H = t_H.rsqrt()
    act, w_2_DH = activation_of(module.act), -2 * w_DH / t_H
    return fused(module, act, units, w_DH.mT, w_2_DH, scales_H, skip=1.0, gain=1.0, off=2 * off)


def _diagonal_error(module: SLL, share: float) -> float:
    """Return the largest relative error of the computed T_ii, whose terms |W^T W| are off by a share of |W|^T |W|."""
    weight, q = module.weight.detach().double().abs(), module.log_q.detach().double().exp()
    most_H = ((weight.mT @ weight) * q).sum(1) / q
    return float((share * most_H / module.diagonal_H().detach().double()).amax())


def constrained_mlp_expansion(module: ConstrainedMlp) -> Expand:
    """Expand (x + f(x)) / 2 by the fused rule with W_2 / 2; ||J|| <= 1/2 + ||J_f / 2||."""
    w_1_HD, w_2_DH = _weights(module.fc1, module.fc2)
    return fused(module, activation_of(module.act), module.fc1, w_1_HD, w_2_DH / 2, skip=0.5)


# rounding of the served types -----------------------------------------------------------------------------------------


def mlp_rounding(module: Mlp, precision: Precision) -> Rounding:
    """Compose the two products and the activation."""
    return of_chain(mlp_chain(module), precision)


def sll_rounding(module: SLL, precision: Precision) -> Rounding:
    """Bound the rounding of x - 2 W T^{-1} act(W^T x + b), which is 1-Lipschitz, so that e passes unchanged.

    The branch is evaluated from x^, within r + e of x. T is off by the share rho, its terms |W^T W| by gamma_{d+H+20}
    of |W|^T |W|.
    """
    layer, u = layer_of(module, local=True), precision.u
    weight, t_H = module.weight.detach().double(), module.diagonal_H().detach().double()
    rho = _diagonal_error(module, precision.gamma(sum(weight.shape) + 20) + 8 * u)
    up, act = matrix_product(weight.mT, module.bias, precision), roundings_of(module.act, precision)
    more = 1.01 * (rho + 3 * u) / (1 - rho) if rho < 0.5 else math.inf
    branch = composed([up, *act, matrix_product(-2 * weight / t_H, None, precision, more)])

    def around(x_BND: Tensor) -> Rounded:
        (y, radius), inner = layer(x_BND), branch(x_BND)
        x_B, inner_B = size(x_BND), size(inner.y)

        def error(r: Tensor, e: Tensor) -> Tensor:
            reach, none = r + e, torch.zeros_like(e)
            own = inner.error(reach, none)
            return (e + own + u * (x_B + reach + inner_B + inner.radius(reach) + own)) * OUT + TINY

        return Rounded(y, radius, error)

    return around


def constrained_mlp_rounding(module: ConstrainedMlp, precision: Precision) -> Rounding:
    """Bound a residual sum, and its half, which is exact."""
    branch = [rounding for part in (module.fc1, module.act, module.fc2) for rounding in roundings_of(part, precision)]
    whole = residual_rounding(branch, precision)

    def around(x: Tensor) -> Rounded:
        twice = whole(x)
        return Rounded(twice.y / 2, lambda r: twice.radius(r) / 2, lambda r, e: twice.error(r, e) / 2 + TINY)

    return around


register(
    Mlp,
    ModuleRules(
        chain=mlp_chain,
        expansion=mlp_expansion,
        rounding=mlp_rounding,
        shapes=lambda module: power_vectors("power_fc1_1D", "power_fc2_1D"),
    ),
)
register(SLL, ModuleRules(rule=sll, expansion=sll_expansion, rounding=sll_rounding, shapes=sll_shapes))
register(
    ConstrainedMlp,
    ModuleRules(rule=constrained_mlp, expansion=constrained_mlp_expansion, rounding=constrained_mlp_rounding),
)
