"""Softmax over the last axis by itself, outside attention, and its rules.

    p = softmax(s),   J = diag(p) - p p^T,   <v, J v> = Var_p(v),   D^2 p [G, G]_i = p_i ((G_i - <p, G>)^2 - Var_p(G))

With q = max_i 2 p_i (1 - p_i) <= 1/2 and z = sqrt2 r, every p_i grows by e^z at most within r, so that for one row

    ||J|| <= q,       |p' - p| <= min(1/2, q (e^z - 1) / z) r,
    |<g, R>| <= (max g - min g) c(r),       |R| <= sqrt2 c(r),       c(r) = min(1/4, q h(z) / 2) r^2,
    h(z) = max(e^{z / 2}, e^{z - 5/2}) >= int_0^1 2 (1 - t) e^{t z} dt.

All of them grow with r at least like r, the last like r^2, so rows join by the maximum.
Proof: docs/proofs.md#primitives.

Letters: B images, C classes, N rows of K entries.
"""

import torch
from torch import Tensor, nn

from zoo.arithmetic import OUT, gamma, length, product
from zoo.bounds.contracts import Bound, Expand, Expansion, Layer
from zoo.bounds.rule_table import ModuleRules, NoRule, register

SQRT2 = 2**0.5 * OUT
LEAST = 1e-300


def _gains(p: Tensor) -> Tensor:
    """Return q of every row: (B, ..., K) -> (B, N).

    1 - p_i of the largest entry is the sum of the others, which does not cancel. What underflowed is below LEAST.
    """
    at = p.argmax(-1, keepdim=True)
    others = p.scatter(-1, at, 0.0).sum(-1, keepdim=True)
    rest = (1 - p).scatter(-1, at, others)
    return (2 * p * rest * OUT).amax(-1).clamp(LEAST, 0.5).view(len(p), -1)


def softmax(module: nn.Softmax) -> Layer:
    """Return the first order around the clean rows."""
    if module.dim != -1:
        raise NoRule(module, f"its axis is {module.dim}; move that axis to the end and set dim=-1")

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        p = module(x)
        q_BN = _gains(p)

        def bound(r: Tensor) -> Tensor:
            z = SQRT2 * r.unsqueeze(-1)
            slope = q_BN * torch.where(z > 0, torch.expm1(z) / z, 1.0).nan_to_num(torch.inf, torch.inf) * OUT
            return product(slope.clamp_max(0.5).amax(-1), r)

        return p, bound

    return layer


def softmax_expansion(module: nn.Softmax) -> Expand:
    """Expand around the clean rows; J is symmetric."""
    first = softmax(module)

    def expand(x: Tensor) -> Expansion:
        p, bound = first(x)
        q_BN = _gains(p)

        def bend(r: Tensor) -> Tensor:
            """Return c(r) of each row, (..., B) -> (..., B, N)."""
            z = SQRT2 * r.unsqueeze(-1)
            share = q_BN / 2 * torch.maximum(z / 2, z - 2.5).exp()
            return product(share.clamp_max(0.25) * OUT, r.unsqueeze(-1).square())

        def whole(r: Tensor) -> Tensor:
            """Bound |R| by both sides of f(x + G) - f(x) - J G."""
            return bound(r) + product(q_BN.amax(-1), r)

        def beta(r: Tensor) -> Tensor:
            return torch.minimum(SQRT2 * bend(r).amax(-1), whole(r))

        def remainder(g: Tensor) -> Bound:
            range_CBN, length_CB = (g.amax(-1) - g.amin(-1)).reshape(*g.shape[:2], -1), length(g.flatten(2))
            return lambda r: torch.minimum(product(range_CBN, bend(r)).amax(-1), product(length_CB, whole(r)))

        def times_j(v: Tensor) -> Tensor:
            return p * (v - (p * v).sum(-1, keepdim=True))

        return Expansion(
            y=p,
            gain_B=q_BN.amax(-1),
            beta=beta,
            remainder=remainder,
            pull=times_j,
            own_push=times_j,
            rounding_B=8 * gamma(4 * p.shape[-1] + 400) * x.new_ones(len(x)),
        )

    return expand


register(nn.Softmax, ModuleRules(rule=softmax, expansion=softmax_expansion))
KINDS = (nn.Softmax,)
