"""Certificates of the model as it is served, in float32 or bfloat16: the loss includes its rounding.

Rounding enters Theorem 1 (docs/proofs.md#identity) as docs/proofs.md#served-model describes. With ||e'_k|| <=
mu_k(e_{k-1}) the rounding of node k, at any point that the node can see (zoo/bounds/rounding.py),

    e_k = the rule of the float64 node + mu_k(e_{k-1}),        m_j falls by  sum_k ||g_{k,j}|| mu_k(e_{k-1})  more,

and the head's own rounding is subtracted from the margins. On the ball of images mu_k is added to the error at the end
of node k. x' is an image of the served type; casting an image to bfloat16 is included.

Letters: B images, J classes.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from certify.adjoint.adjoint import Adjoint, AdjointAnalysis
from certify.image.image import Image
from certify.methods import AUTO, METHODS
from certify.methods.lofast import LoFAST, LoFASTAnalysis
from certify.shared.bake import Model, refuse_impostor
from certify.shared.ball import L2, Ball
from certify.shared.certificate import Certificate, Certifier, Clean, decide, per_image
from certify.taylor.taylor import Taylor
from certizoo import UserError
from certizoo.text import shown
from zoo.arithmetic import OUT, nan_to_inf, product
from zoo.bounds.contracts import Bound, Expansion, Layer, Node, Precision, Rounding
from zoo.bounds.first_order import Step, layer_of, parts_of
from zoo.bounds.rounding import PRECISIONS, TINY, of_chain, trunk_roundings
from zoo.bounds.rule_table import Link, NoRule


class ServedAnalysis(AdjointAnalysis):
    """The adjoint analysis with radii that include the rounding `mus` of nodes, and margins less that of the head."""

    def __init__(self, exact: AdjointAnalysis, mus: Sequence[Bound], head_error: Bound) -> None:
        super().__init__(exact.clean, exact.steps, exact.chain, exact.head, exact.measure, exact.few)
        self._mus, self._head_error = mus, head_error

    def off_behind(self, node: int, r_B: Tensor) -> Tensor:
        return super().off_behind(node, r_B) + self._mus[node](r_B)

    def kept(self, r_B: Tensor) -> Tensor:
        return self._head_error(r_B)


class ServedAdjoint(Adjoint):
    """The certifier of `model` served in `dtype`. Raises NoRule where a module has no bound of its rounding."""

    types = tuple(PRECISIONS)

    def __init__(self, model: nn.Module, dtype: torch.dtype, nonce: str | None = None, norm: str = L2) -> None:
        super().__init__(_in_type(model, dtype), nonce, norm)
        self.model = self.model.also(model)
        self.precision = PRECISIONS[dtype]
        self.roundings = trunk_roundings(self.baked, self.precision)
        self.nodes = [_rounded(node, rounding) for node, rounding in zip(self.nodes, self.roundings, strict=True)]

    def expand(self, images_BCHW: Tensor, clean: Clean, norm: str | None = None) -> AdjointAnalysis:
        exact = super().expand(images_BCHW, clean, norm)
        points = exact.chain.points
        mus = [_mu(rounding, x) for rounding, x in zip(self.roundings, points, strict=False)]
        return ServedAnalysis(exact, mus, head_error(self.head, points[-1], self.precision))


class ServedImage(Image, ServedAdjoint):
    """The certifier of `model` served in `dtype`, on the ball of images."""


class ServedTaylor(Taylor, ServedAdjoint):
    """The certifier of `model` served in `dtype`, to second order exactly where it has the rules."""


@dataclass(frozen=True)
class ServedLoFASTAnalysis(LoFASTAnalysis):
    """The LoFAST analysis with margins less the head's rounding."""

    head_error: Bound = torch.zeros_like

    def at(self, eps: float | Tensor) -> Certificate:
        eps_B = per_image(eps, self.clean)
        e_B = nan_to_inf(self.radius(self.ball.radius(eps_B)))
        kept_BJ = self.head_error(e_B).nan_to_num(torch.inf)
        clean = replace(self.clean, margin_BJ=self.clean.margin_BJ - kept_BJ)
        return decide(clean, product(self.weight_BJ, e_B[:, None]), eps_B)


class ServedLoFAST(LoFAST):
    """The certifier by radii alone: e_k = the rule of link k + mu_k(e_{k-1}); a link is one step."""

    types = tuple(PRECISIONS)

    def __init__(self, model: nn.Module, dtype: torch.dtype, norm: str = L2) -> None:
        self.precision = PRECISIONS.get(dtype, PRECISIONS[torch.float32])
        super().__init__(_in_type(model, dtype), norm)
        self.model = self.model.also(model)

    def layers(self, link: nn.Module | Link) -> Sequence[Layer]:
        layer = layer_of(link, local=self.local)
        return [Step(_rounded_layer(layer, of_chain([link], self.precision)), parts_of(layer))]

    def bounds(self, x: Tensor, clean: Clean, ball: Ball) -> LoFASTAnalysis:
        exact, end = super().bounds(x, clean, ball), x
        for step in self.steps:
            end, _ = step(end)
        return ServedLoFASTAnalysis(**vars(exact), head_error=head_error(self.head, end, self.precision))


class ServedLocalLoFAST(ServedLoFAST):
    """`ServedLoFAST` with local rules."""

    local = True


def _best(model: nn.Module, dtype: torch.dtype, nonce: str | None, norm: str) -> Certifier:
    """Return the strongest certifier; CROWN is left out because it does not bound rounding."""
    try:
        return ServedTaylor(model, dtype, nonce, norm)
    except NoRule:
        return ServedLoFAST(model, dtype, norm)


# name -> certifier of (model, the type it is served in, the nonce of random starts, the norm of the balls)
SERVED_METHODS: dict[str, Callable[[nn.Module, torch.dtype, str | None, str], Certifier]] = {
    "lofast": lambda model, dtype, nonce, norm: ServedLoFAST(model, dtype, norm),
    "lofast_local": lambda model, dtype, nonce, norm: ServedLocalLoFAST(model, dtype, norm),
    "adjoint": ServedAdjoint,
    "image": ServedImage,
    "taylor": ServedTaylor,
    "best": _best,
}


TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in PRECISIONS}


def require_served(dtype: str | None, method: str | None, key: str) -> None:
    """Raise UserError, naming the configuration key, for an unsupported type or a method that ignores rounding."""
    methods = (AUTO, *SERVED_METHODS)
    if dtype is not None and (method not in methods or dtype not in TYPES):
        raise UserError(
            f"{key}={shown(dtype)}: set null, or one of {', '.join(TYPES)} with method {', '.join(methods)}"
        )


def certifier_of(
    model: nn.Module | Model, method: str, served_dtype: str | None, nonce: str | None, norm: str
) -> Certifier:
    """Return the certifier of a method, for the model as it is served in that type or for its float64 function.

    Raises UserError for a captured model with a type: how its own code rounds is not proved.
    """
    if served_dtype is None:
        return METHODS[method](model, nonce, norm)
    if isinstance(model, Model):
        raise UserError(
            f"served_dtype={served_dtype}: the rounding of this model's own code is not proved; add served_dtype=null "
            "to certify its float64 function"
        )
    return SERVED_METHODS[method](model, TYPES[served_dtype], nonce, norm)


def _in_type(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    refuse_impostor(model)
    if dtype not in PRECISIONS:
        raise UserError(f"served_dtype={dtype}: choose one of float32, bfloat16, or null for the float64 function")
    return copy.deepcopy(model).to(dtype)


def head_error(head: nn.Linear, x_BD: Tensor, precision: Precision) -> Callable[[Tensor], Tensor]:
    """Return bounds r (B,) -> |fl(m_j) - m_j| (B, J) of the head's own rounding, for the margin of any label over j."""
    length_J = torch.linalg.vector_norm(head.weight, dim=1)
    bias_J = torch.zeros_like(length_J) if head.bias is None else head.bias.abs()
    x_B = torch.linalg.vector_norm(x_BD, dim=1)

    def error(r: Tensor) -> Tensor:
        size_BJ = length_J * (x_B + r)[:, None] + bias_J
        logit_BJ = (precision.gamma(head.in_features + 2) + precision.u) * size_BJ * OUT + TINY
        return logit_BJ + logit_BJ.amax(1, keepdim=True)

    return error


def _mu(rounding: Rounding, x: Tensor) -> Bound:
    """Return the bound of a node's rounding at any point within r of x."""
    rounded = rounding(x)
    return lambda r: nan_to_inf(rounded.error(r, torch.zeros_like(r)))


def _rounded_layer(layer: Layer, rounding: Rounding) -> Layer:
    """Return the layer with mu added to its radius."""

    def rounded(x: Tensor) -> tuple[Tensor, Bound]:
        (y, bound), mu = layer(x), _mu(rounding, x)
        return y, lambda r: bound(r) + mu(r)

    return rounded


def _rounded(node: Node, rounding: Rounding) -> Node:
    """Return the node with mu added to its radius, its beta and its remainder."""
    layer, expand = node

    def rounded_expand(x: Tensor) -> Expansion:
        unrounded, mu = expand(x), _mu(rounding, x)

        def remainder(g: Tensor) -> Bound:
            exact, length_CB = unrounded.remainder(g), torch.linalg.vector_norm(g.flatten(2), dim=-1)
            return lambda r: exact(r) + product(length_CB, mu(r))

        return replace(unrounded, beta=lambda r: unrounded.beta(r) + mu(r), remainder=remainder)

    return _rounded_layer(layer, rounding), rounded_expand
