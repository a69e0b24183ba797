"""The adjoint certificate of the model that is served, float32 or bfloat16: rounding is part of what the ball can cost.

Theorem 1 of MATH-PROOFS.md section 1 has a place for it: with ||e'_k|| <= mu_k(e_{k-1}) the rounding of node k, at any
point that the node can see (`certify.methods.rounding`),

    e_k = the rule of the float64 node + mu_k(e_{k-1}),        m_j falls by  sum_k ||g_{k,j}|| mu_k(e_{k-1})  more,

and the head's own rounding is kept back from the margins. x' is an image of the served type; what casting an image to
bfloat16 does is counted. Letters: B images, J classes.
"""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from certify.methods.adjoint import Adjoint, AdjointAnalysis
from certify.methods.certificate import Breakdown, Certificate, Clean, decide_by, per_image
from certify.methods.rounding import UNITS, Rounding, head_error, nodes_of_model
from certizoo import UserError
from zoo.arithmetic import known, product
from zoo.bounds.curvature import Expansion, Node
from zoo.bounds.rules import Bound, local


class ServedAnalysis:
    """`AdjointAnalysis` with margins that are smaller by what the head rounds, which depends on the radius."""

    def __init__(self, inner: AdjointAnalysis, head: Callable[[Tensor], Tensor]) -> None:
        self._inner, self._head = inner, head
        self.failure = inner.failure

    @property
    def clean(self) -> Clean:
        return self._inner.clean

    def at(self, eps: float | Tensor) -> Certificate:
        eps_B = per_image(eps, self.clean)
        radii = self._inner.radii(eps_B)
        view = copy.copy(self._inner)
        view.clean = replace(self.clean, margin_BJ=self.clean.margin_BJ - self._head(radii.e[-1]).nan_to_num(torch.inf))
        loss_BJ, class_B = view.losses(radii)
        return decide_by(view.clean, loss_BJ, eps_B, class_B)

    def breakdown(self, eps: float | Tensor) -> Breakdown:
        """That of the nodes; the head is left out."""
        return self._inner.breakdown(eps)


class ServedAdjoint(Adjoint):
    """The certifier of `model` served in `dtype`. Raises NoRule where a module has no bound of its rounding."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        if dtype not in UNITS:
            raise UserError(f"served_dtype={dtype}: choose one of float32, bfloat16, or null for the float64 function")
        super().__init__(copy.deepcopy(model).to(dtype))
        self.unit = UNITS[dtype]
        with local():
            rules = nodes_of_model(self.baked, self.unit)
        self.nodes = [_rounded(node, rule) for node, rule in zip(self.nodes, rules, strict=True)]

    def expand(self, images_BCHW: Tensor, clean: Clean) -> ServedAnalysis:  # type: ignore[override]
        inner = super().expand(images_BCHW, clean)
        return ServedAnalysis(inner, head_error(self.head, inner.chain.points[-1], self.unit))


def _rounded(node: Node, rule: Rounding) -> Node:
    """The node with mu in its radius, its beta and its remainder."""
    layer, expand = node

    def mu_of(x: Tensor) -> Bound:
        part = rule(x)
        return lambda r: known(part.error(r, torch.zeros_like(r)))

    def rounded_layer(x: Tensor) -> tuple[Tensor, Bound]:
        (y, bound), mu = layer(x), mu_of(x)
        return y, lambda r: bound(r) + mu(r)

    def rounded_expand(x: Tensor) -> Expansion:
        unrounded, mu = expand(x), mu_of(x)

        def remainder(g: Tensor) -> Bound:
            exact, length_CB = unrounded.remainder(g), torch.linalg.vector_norm(g.flatten(2), dim=-1)
            return lambda r: exact(r) + product(length_CB, mu(r))

        return replace(unrounded, beta=lambda r: unrounded.beta(r) + mu(r), remainder=remainder)

    return rounded_layer, rounded_expand
