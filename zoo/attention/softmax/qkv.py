"""Rules of first and second order for any attention that turns its tokens into queries, keys and values.

    X -> (q^, k^, v^) = X [W_Q W_K W_V] + biases -> (q, k, v) = transform(q^, k^, v^) -> core -> W_O

The first and the last step are linear. `transform` is the identity, or what a variant does to its projections
(`QKVTransform`). The core is `SeparateCore` of theory/; theory/core.py defines the terms. A variant states its steps by
the rule `split`, from which all rules follow: its own, and those inside windows (window.py) and with gated positions
(gpsa.py). The composition is that of zoo/bounds/curvature.py, with three radii instead of one:

    <g, R(G)> = <o, R_core> + <J_core^T o, R_transform>,     o = g W_O^T,
    ||R(G)|| <= ||W_O|| ( beta_core + sum_{q,k,v} ||J_core|| beta_transform ).

Letters: B images (or windows), C classes, H heads, N tokens, D width, O width of a head; 3 stands for q, k, v.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.arithmetic import gamma, product
from zoo.attention.softmax.computed import errors_of, scores
from zoo.attention.softmax.module import QKVAttention
from zoo.attention.softmax.parts import core_leaf, merge_leaf, unknown
from zoo.attention.softmax.projected_forms import Projection
from zoo.attention.softmax.rows import RoundedRows, projected
from zoo.attention.theory.core import QKVRadii, Score
from zoo.attention.theory.joint import same
from zoo.attention.theory.score_errors import Inexact
from zoo.attention.theory.separate import SeparateCore
from zoo.bounds.contracts import Bound, Expand, Expansion, Layer, Precision
from zoo.bounds.hypotheses import Shapes, power_vectors
from zoo.bounds.products import chained
from zoo.bounds.rule_table import NoRule, expect, rules_of
from zoo.spectral import sigma_upper

ThreeBounds = Callable[[QKVRadii], QKVRadii]
Leaves = Callable[[Projection, Expansion, Expansion], tuple[Expansion, ...]]


@dataclass(frozen=True)
class QKVTransform:
    """The map (q^, k^, v^) -> (q, k, v) around a clean batch, with J any linear map (docs/proofs.md#identity).

    first(r) bounds how far J moves each of q, k, v; radii(r) how far they move; betas(r) how far they leave J.
    remainder(g): for g (3, C, B, H, N, O), never below -<g, R> (..., C, B). pull(g): J^T g. All of them are
    superhomogeneous, as in theory/core.py. leaves(first, own, core): the chain of projection, transform and core.

    Proof: docs/proofs.md#qkv-transform.
    """

    y_3: Tensor  # (3, B, H, N, O)
    first: ThreeBounds
    radii: ThreeBounds
    betas: ThreeBounds
    remainder: Callable[[Tensor], Callable[[QKVRadii], Tensor]]
    pull: Callable[[Tensor], Tensor]
    leaves: Leaves


def identity(y_3: Tensor) -> QKVTransform:
    """Return the transform whose q, k and v are the projections themselves."""

    def same(r: QKVRadii) -> QKVRadii:
        return r

    def zero(r: QKVRadii) -> QKVRadii:
        return QKVRadii(*(torch.zeros_like(one) for one in r))

    def leaves(first: Projection, own: Expansion, core: Expansion) -> tuple[Expansion, ...]:
        return first.leaf, core

    return QKVTransform(y_3, same, same, zero, lambda g: lambda r: torch.zeros_like(r.q), lambda g: g, leaves)


@dataclass(frozen=True)
class Split:
    """The steps of one attention module.

    `project` maps x (B, N, D) -> (3, B, H, N, O), affine with the weights w_3HOD. `scores` is what `transform` is
    around a clean batch, as a plain function; where the two differ nothing is known. `rounded` is the rounding of q, k
    and v as they are served (rows.py); None: there is no bound. `off_values` bounds the distance of the computed
    weights of the values from the exact ones, in norm, for all heads together.
    """

    score: Score
    project: Callable[[Tensor], Tensor]
    w_3HOD: Tensor
    proj: nn.Linear
    transform: Callable[[Tensor], QKVTransform] = identity
    scores: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = lambda q, k, v: (q, k, v)
    rounded: Callable[[Precision], RoundedRows] | None = None
    off_values: Tensor | float = 0.0


def split_of(module: nn.Module) -> Split:
    """Return the steps of a softmax attention. Raises `NoRule`."""
    split = rules_of(module).split
    if split is None:
        raise NoRule(module, "its rules have no `split`, which says how queries, keys and values are made")
    found: Split = split(module)
    return found


def qkv_split(
    module: QKVAttention,
    transform: Callable[[Tensor], QKVTransform] = identity,
    rounded: Callable[[Precision], RoundedRows] | None = None,
) -> Split:
    """Return the steps of a variant that projects by one matrix, as in timm. `rounded` is that of `transform`."""
    expect(module.qkv, nn.Linear)
    expect(module.proj, nn.Linear)
    weights = module.head_weights_3HOD().detach().double()
    score, own = Score(module.scale), partial(projected, module) if transform is identity else rounded
    project = partial(_projections, module)
    return Split(score, project, weights, module.proj, transform, module.scores, rounded=rounded or own)


def _projections(module: QKVAttention, x: Tensor) -> Tensor:
    return torch.stack(module.projections(x))


def qkv_shapes(module: QKVAttention) -> Shapes:
    """Return the shapes of W_Q, W_K, W_V of all heads in one matrix, and of W_O."""
    dim = module.qkv.in_features
    return {"qkv.weight": (3 * dim, dim), "proj.weight": (dim, dim), **power_vectors("power_3HD", "power_o_1D")}


@dataclass(frozen=True)
class MixingError:
    """The errors of what is served around the softmax.

    `bias` is never below |bias| of any score. `roundings` counts those of P~ and its products with the values, relative
    to themselves. In addition, entries of P~ are off by `delta` of those of P, and by `constants`.
    """

    bias: float = 0.0
    roundings: int = 2
    delta: float = 0.0
    constants: Tensor | float = 0.0


def nothing_around(precision: Precision, tokens: int) -> MixingError:
    """Return the errors of the softmax alone."""
    return MixingError()


@dataclass(frozen=True)
class Mixing:
    """From the scores to the matrix that mixes the values: P = softmax(S + bias), and mix(P) before V.

    Per head, mix is an affine map of P with the linear part `gain_H`. bias(windows) broadcasts to (windows, H, N, N).
    `rounding` takes the number of tokens; None: there is no bound. mix(P) has no negative entries, and rows that sum to
    1.
    """

    bias: Callable[[int], Tensor | float] = lambda windows: 0.0
    mix: Callable[[Tensor], Tensor] = lambda p_BHNN: p_BHNN
    gain_H: Tensor | float = 1.0
    rounding: Callable[[Precision, int], MixingError] | None = None


PLAIN = Mixing(rounding=nothing_around)


class AttentionBounds:
    """Bounds of an attention whose steps are known, the norms of its weights measured once.

    `module` is `content` itself, or attention around it with other mixing.
    """

    def __init__(self, module: Callable[[Tensor], Tensor], content: nn.Module, mixing: Mixing = PLAIN) -> None:
        self.module, self.mixing, self.split = module, mixing, split_of(content)
        weights = self.split.w_3HOD
        q, k, v = sigma_upper(weights.flatten(1, 2))
        self.norms = QKVRadii(q, k, v + self.split.off_values)
        self.norm_o = sigma_upper(self.split.proj.weight)
        gain_H = torch.as_tensor(mixing.gain_H, dtype=weights.dtype, device=weights.device)
        self.gain_H = gain_H.expand(weights.shape[1])
        o_DHO = self.split.proj.weight.detach().double().unflatten(1, weights.shape[1:3])
        self.o_HDO = o_DHO.transpose(0, 1)

    def core(self, transform: QKVTransform) -> SeparateCore:
        """Return the core around the output of `transform`."""
        q, k, v = transform.y_3.unbind(0)
        p_BHNN = self._attend(scores(self.split.score, q, k))
        return SeparateCore(self.split.score, q, k, v, p_BHNN, self.mixing.mix(p_BHNN), self.gain_H)

    def inexact(self, x_BND: Tensor, core: SeparateCore, transform: QKVTransform) -> Inexact:
        """Return the cost of errors in the computed core."""
        score, y_3 = self.split.score, transform.y_3
        s_BHNN = scores(score, core.q, core.k)
        off = errors_of(x_BND, self._rows, score, y_3, s_BHNN, self._attend, core.p, self.mixing.mix)
        return Inexact(core, y_3[2], off)

    def _rows(self, x_BND: Tensor) -> Tensor:
        return torch.stack(self.split.scores(*self.split.project(x_BND).unbind(0)))

    def _attend(self, s_BHNN: Tensor) -> Tensor:
        return (s_BHNN + self.mixing.bias(len(s_BHNN))).softmax(-1)

    def projected(self, r: Tensor) -> QKVRadii:
        """Bound ||X' W|| <= ||W|| r for the matrices of all heads together: the heads share one budget."""
        return QKVRadii(*(norm * r for norm in self.norms))

    def layer(self, x_BND: Tensor) -> tuple[Tensor, Bound]:
        """Return the first order with the constants of this batch; superhomogeneous."""
        transform = self.split.transform(self.split.project(x_BND))
        core = self.core(transform)
        inexact = self.inexact(x_BND, core, transform)

        def bound(r: Tensor) -> Tensor:
            r_3 = transform.radii(self.projected(r))
            return self.norm_o * (core.radius(r_3) + inexact.norm(r_3, r_3))

        return self.module(x_BND), bound

    def expand(self, x_BND: Tensor) -> Expansion:
        """Return the second order."""
        return widened(*self.expand_apart(x_BND))

    def expand_apart(self, x_BND: Tensor) -> tuple[Expansion, Bound]:
        """Return the second order of the computed core, and how far the exact one may leave it.

        All bounds are superhomogeneous, the last one of degree 1.
        """
        projected_3BHNO = self.split.project(x_BND)
        transform = self.split.transform(projected_3BHNO)
        core = self.core(transform)
        inexact, gains = self.inexact(x_BND, core, transform), core.gains

        def through(r: QKVRadii) -> Tensor:
            return sum((product(gain, one) for gain, one in zip(gains, r, strict=True)), torch.zeros_like(r.q))

        def beta(r: Tensor) -> Tensor:
            r_3 = self.projected(r)
            return self.norm_o * (core.beta(transform.radii(r_3)) + through(transform.betas(r_3)))

        def outwards(g_CBND: Tensor) -> Tensor:
            return torch.einsum("cbnd,hdo->cbhno", g_CBND, self.o_HDO)

        def remainder(g_CBND: Tensor) -> Bound:
            o_CBHNO = outwards(g_CBND)
            of_core, of_transform = core.remainder(o_CBHNO), transform.remainder(torch.stack(core.pull(o_CBHNO)))

            def bound(r: Tensor) -> Tensor:
                r_3 = self.projected(r)
                return of_core(transform.radii(r_3)) + of_transform(r_3)

            return bound

        def pull(g_CBND: Tensor) -> Tensor:
            pulled_3CBHNO = transform.pull(torch.stack(core.pull(outwards(g_CBND))))
            return torch.einsum("xcbhno,xhod->cbnd", pulled_3CBHNO, self.split.w_3HOD)

        ones, y_BND = torch.ones(len(x_BND), dtype=x_BND.dtype, device=x_BND.device), self.module(x_BND)
        gain_B = self.norm_o * through(transform.first(self.projected(ones)))
        leaves = self._leaves(projected_3BHNO, transform, inexact, y_BND)

        def off(r: Tensor) -> Tensor:
            r_3 = transform.radii(self.projected(r))
            return self.norm_o * inexact.norm(r_3, r_3)

        return Expansion(
            y=y_BND, gain_B=gain_B, beta=beta, remainder=remainder, pull=pull, rounding_B=chained(leaves), parts=leaves
        ), off

    def _leaves(
        self, projected_3BHNO: Tensor, transform: QKVTransform, inexact: Inexact, y_BND: Tensor
    ) -> tuple[Expansion, ...]:
        """Return the leaves of the chain; see parts.py."""
        first = Projection(projected_3BHNO.transpose(0, 1), self.split.w_3HOD, self.split.off_values)
        core = core_leaf(inexact.core, transform.y_3[2], inexact)
        return *transform.leaves(first, transform_leaf(transform), core), merge_leaf(y_BND, self.o_HDO.mT)


def transform_leaf(transform: QKVTransform) -> Expansion:
    """Expand what a variant does to its projections; how far that leaves J is for the leaf around it to know."""
    ones_B = torch.ones_like(transform.y_3[0].flatten(1)[:, 0])
    gain_B = torch.stack(transform.first(same(ones_B))).square().sum(0).sqrt()
    return Expansion(
        y=transform.y_3.transpose(0, 1),
        gain_B=gain_B,
        beta=unknown,
        remainder=lambda g: unknown,
        pull=lambda g_CB3HNO: transform.pull(g_CB3HNO.movedim(2, 0)).movedim(0, 2),
        rounding_B=16 * gamma(transform.y_3[0, 0, 0].numel() + 64) * gain_B,
    )


def widened(computed: Expansion, off: Bound) -> Expansion:
    """Add `off`, how far the exact map may leave the computed one: |R| and -<g, R> / |g| grow by that."""

    def remainder(g: Tensor) -> Bound:
        bound, length_CB = computed.remainder(g), g.flatten(2).norm(dim=-1)
        return lambda r: bound(r) + product(length_CB, off(r))

    return replace(computed, beta=lambda r: computed.beta(r) + off(r), remainder=remainder)


def bounded(expand: Expand, layer: Layer) -> Expand:
    """Bound ||R|| <= lip(r) + ||J|| r for any first-order rule, and -<g, R> <= ||g|| ||R||.

    The result is no longer superhomogeneous.
    """

    def expand_bounded(x: Tensor) -> Expansion:
        inner, (_, lip) = expand(x), layer(x)

        def beta(r: Tensor) -> Tensor:
            return torch.minimum(inner.beta(r), lip(r) + product(inner.gain_B, r))

        def remainder(g: Tensor) -> Bound:
            bound, length_CB = inner.remainder(g), g.flatten(2).norm(dim=-1)
            return lambda r: torch.minimum(bound(r), product(length_CB, beta(r)))

        return replace(inner, beta=beta, remainder=remainder)

    return expand_bounded


def least(*layers: Layer) -> Layer:
    """Return the least bound of several rules that hold for the same map."""

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        found: list[tuple[Tensor, Any]] = [one(x) for one in layers]
        return found[0][0], lambda r: torch.stack([bound(r) for _, bound in found]).amin(0)

    return layer
