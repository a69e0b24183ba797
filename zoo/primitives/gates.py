"""A product of two branches entry by entry, a(x) b(x): gates, squeeze and excitation, squares.

    a' b' - a b = b A + a B + A B,        A = a' - a,  B = b' - b,        ||A B||_F <= ||A||_F ||B||_F

    first order     |b|_max r_a + |a|_max r_b + r_a r_b
    second order    J = b J_a + a J_b,    R = b R_a + a R_b + A B,    -<g, A B> <= |g|_max r_a r_b

with r_a, r_b the radii of the branches. Proof: docs/proofs.md#primitives.
"""

import torch
from torch import Tensor, nn

from zoo.arithmetic import OUT, U, product
from zoo.bounds.contracts import Bound, Expand, Expansion, Layer
from zoo.bounds.curvature import composition, identity_expansion, nodes_of
from zoo.bounds.first_order import chain, layer_of
from zoo.bounds.rule_table import ModuleRules, NoRule, register


class Gate(nn.Module):
    """The product of what two branches make of one input; an empty `nn.Sequential` is the identity."""

    def __init__(self, first: nn.Sequential, second: nn.Sequential) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        a: Tensor = self.first(x)
        return a * self.second(x)


def _largest(x: Tensor) -> Tensor:
    """Return the largest modulus of each image: (B,)."""
    return x.flatten(1).abs().amax(1)


def _refuse_broadcast(module: Gate, a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise NoRule(module, f"its branches make {tuple(a.shape[1:])} and {tuple(b.shape[1:])}; expand one of them")


def gate(module: Gate, *, local: bool) -> Layer:
    """Return the first-order rule."""
    layers = [chain([layer_of(branch, local=local)]) for branch in (module.first, module.second)]

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        (a, a_bound), (b, b_bound) = (one(x) for one in layers)
        _refuse_broadcast(module, a, b)
        a_B, b_B = _largest(a), _largest(b)

        def bound(r: Tensor) -> Tensor:
            r_a, r_b = a_bound(r), b_bound(r)
            return (product(b_B, r_a) + product(a_B, r_b) + product(r_a, r_b)) * OUT

        return a * b, bound

    return layer


def gate_expansion(module: Gate) -> Expand:
    """Expand the product."""
    branches = (module.first, module.second)
    expansions = [composition(nodes) if (nodes := nodes_of(branch)) else identity_expansion for branch in branches]
    layers = [chain([layer_of(branch, local=True)]) for branch in branches]

    def expand(x: Tensor) -> Expansion:
        first, second = (one(x) for one in expansions)
        a, b = first.y, second.y
        _refuse_broadcast(module, a, b)
        a_B, b_B = _largest(a), _largest(b)
        bounds = [layer(x)[1] for layer in layers]

        def both(r: Tensor) -> Tensor:
            """Bound ||A|| ||B||, each branch by its first order or by its linearisation."""
            parts = zip(bounds, (first, second), strict=True)
            r_a, r_b = (torch.fmin(one(r), product(of.gain_B, r) + of.beta(r)) for one, of in parts)
            return product(r_a, r_b) * OUT

        def beta(r: Tensor) -> Tensor:
            return (product(b_B, first.beta(r)) + product(a_B, second.beta(r)) + both(r)) * OUT

        def remainder(g: Tensor) -> Bound:
            of_a, of_b, g_CB = first.remainder(g * b), second.remainder(g * a), g.flatten(2).abs().amax(2)
            return lambda r: (of_a(r) + of_b(r) + product(g_CB, both(r))) * OUT

        gain_B = (b_B * first.gain_B + a_B * second.gain_B) * OUT
        return Expansion(
            y=a * b,
            gain_B=gain_B,
            beta=beta,
            remainder=remainder,
            pull=lambda g: first.pull(g * b) + second.pull(g * a),
            own_push=lambda v: first.push(v) * b + second.push(v) * a,
            rounding_B=(b_B * first.rounding + a_B * second.rounding + 8 * U * gain_B) * OUT,
        )

    return expand


register(
    Gate,
    ModuleRules(
        rule=lambda module: gate(module, local=False),
        local=lambda module: gate(module, local=True),
        expansion=gate_expansion,
    ),
)
KINDS = (Gate,)
