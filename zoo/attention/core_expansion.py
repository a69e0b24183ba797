"""Rules of first and second order for any attention that turns its tokens into queries, keys and values:

    X -> (q^, k^, v^) = X [W_Q W_K W_V] + biases -> (q, k, v) = turn(q^, k^, v^) -> core -> W_O

The first and the last step are linear. `turn` is the identity, or what a variant does to its projections (`Turn`); the
core is that of `core_forms.py`. A variant says what its steps are by the fact `split`, and has by that all rules: its
own, and those inside windows (window.py) and with gated positions (gpsa.py). The composition is that of
zoo/bounds/curvature.py, with three radii in place of one:

    <g, R(G)> = <o, R_core> + <J_core^T o, R_turn>,     o = g W_O^T,
    ||R(G)|| <= ||W_O|| ( beta_core + sum_{q,k,v} ||J_core|| beta_turn ).

Letters: B images (or windows), C classes, H heads, N tokens, D width, O width of a head; 3 stands for q, k, v.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo.arithmetic import product
from zoo.attention.core_forms import Core, Radii, Score
from zoo.attention.softmax import QKVAttention
from zoo.bounds.curvature import Expand, Expansion
from zoo.bounds.facts import NoRule, expect, facts_of
from zoo.bounds.rules import Bound, Layer
from zoo.spectral import sigma_upper

ThreeBounds = Callable[[Radii], Radii]


@dataclass(frozen=True)
class Turn:
    """(q^, k^, v^) -> (q, k, v) around a clean batch, with J any linear map (Theorem 1 of MATH-PROOFS section 1).

    first(r): how far J moves each of q, k, v; radii(r) how far they move; betas(r) how far they leave J.
    remainder(g): for g (3, C, B, H, N, O), never below -<g, R> (..., C, B). pull(g): J^T g.
    All of them steep, as in core_forms.py.
    """

    y_3: Tensor  # (3, B, H, N, O)
    first: ThreeBounds
    radii: ThreeBounds
    betas: ThreeBounds
    remainder: Callable[[Tensor], Callable[[Radii], Tensor]]
    pull: Callable[[Tensor], Tensor]


def identity_turn(y_3: Tensor) -> Turn:
    """q, k and v are the projections themselves."""

    def same(r: Radii) -> Radii:
        return r

    def zero(r: Radii) -> Radii:
        return Radii(*(torch.zeros_like(one) for one in r))

    return Turn(y_3, same, same, zero, lambda g: lambda r: torch.zeros_like(r.q), lambda g: g)


@dataclass(frozen=True)
class Split:
    """The steps of one attention module. project: x (B, N, D) -> (3, B, H, N, O), affine with the weights w_3HOD."""

    score: Score
    project: Callable[[Tensor], Tensor]
    w_3HOD: Tensor
    proj: nn.Linear
    turn: Callable[[Tensor], Turn] = identity_turn


def split_of(module: nn.Module) -> Split:
    """The steps of a softmax attention. Raises `NoRule`."""
    split = facts_of(module).split
    if split is None:
        raise NoRule(module, "it is not known how its queries, keys and values are made")
    found: Split = split(module)
    return found


def qkv_split(module: QKVAttention, turn: Callable[[Tensor], Turn] = identity_turn) -> Split:
    """For variants that project by one matrix, as in timm."""
    expect(module.qkv, nn.Linear)
    expect(module.proj, nn.Linear)
    weights = module.head_weights_3HOD().detach().double()
    return Split(Score(module.scale), lambda x: torch.stack(module.projections(x)), weights, module.proj, turn)


@dataclass(frozen=True)
class Around:
    """What stands around the scores and the softmax: P = softmax(S + bias), and mix(P) in front of V, per head an
    affine map of P with the linear part `gain_H`. bias(windows) broadcasts to (windows, H, N, N)."""

    bias: Callable[[int], Tensor | float] = lambda windows: 0.0
    mix: Callable[[Tensor], Tensor] = lambda p_BHNN: p_BHNN
    gain_H: Tensor | float = 1.0


PLAIN = Around()


class Measured:
    """An attention with the norms of its weights; `at` a clean batch it has a `Point`."""

    def __init__(self, module: Callable[[Tensor], Tensor], content: nn.Module, around: Around = PLAIN) -> None:
        self.module, self.around, self.split = module, around, split_of(content)
        weights = self.split.w_3HOD
        self.norms = Radii(*sigma_upper(weights.flatten(1, 2)))
        self.norm_o = sigma_upper(self.split.proj.weight)
        gain_H = torch.as_tensor(around.gain_H, dtype=weights.dtype, device=weights.device)
        self.gain_H = gain_H.expand(weights.shape[1])
        o_DHO = self.split.proj.weight.detach().double().unflatten(1, weights.shape[1:3])
        self.o_HDO = o_DHO.transpose(0, 1)

    def core(self, turn: Turn) -> Core:
        """The core around what `turn` gives."""
        score, (q, k, v) = self.split.score, turn.y_3.unbind(0)
        s_BHNN = score.s * (q @ k.mT - score.kappa / 2 * k.square().sum(-1).unsqueeze(-2))
        p_BHNN = (s_BHNN + self.around.bias(len(s_BHNN))).softmax(-1)
        return Core(score, q, k, v, p_BHNN, self.around.mix(p_BHNN), self.gain_H)

    def spread(self, r: Tensor) -> Radii:
        """||X' W|| <= ||W|| r of the matrices of all heads together: the heads share one budget."""
        return Radii(*(norm * r for norm in self.norms))

    def layer(self, x_BND: Tensor) -> tuple[Tensor, Bound]:
        """First order, with the constants of this batch; steep."""
        turn = self.split.turn(self.split.project(x_BND))
        core = self.core(turn)
        return self.module(x_BND), lambda r: self.norm_o * core.radius(turn.radii(self.spread(r)))

    def expand(self, x_BND: Tensor) -> Expansion:
        """Second order; all bounds steep."""
        turn = self.split.turn(self.split.project(x_BND))
        core = self.core(turn)
        gains = core.gains

        def through(r: Radii) -> Tensor:
            return sum((product(gain, one) for gain, one in zip(gains, r, strict=True)), torch.zeros_like(r.q))

        def beta(r: Tensor) -> Tensor:
            r_3 = self.spread(r)
            return self.norm_o * (core.beta(turn.radii(r_3)) + through(turn.betas(r_3)))

        def outwards(g_CBND: Tensor) -> Tensor:
            return torch.einsum("cbnd,hdo->cbhno", g_CBND, self.o_HDO)

        def remainder(g_CBND: Tensor) -> Bound:
            o_CBHNO = outwards(g_CBND)
            of_core, of_turn = core.remainder(o_CBHNO), turn.remainder(core.pull(o_CBHNO))

            def bound(r: Tensor) -> Tensor:
                r_3 = self.spread(r)
                return of_core(turn.radii(r_3)) + of_turn(r_3)

            return bound

        def pull(g_CBND: Tensor) -> Tensor:
            return torch.einsum("xcbhno,xhod->cbnd", turn.pull(core.pull(outwards(g_CBND))), self.split.w_3HOD)

        ones = torch.ones(len(x_BND), dtype=x_BND.dtype, device=x_BND.device)
        gain_B = self.norm_o * through(turn.first(self.spread(ones)))
        return Expansion(self.module(x_BND), gain_B, beta, remainder, pull)


def bounded(expand: Expand, layer: Layer) -> Expand:
    """||R|| <= lip(r) + ||J|| r for any rule of first order, and -<g, R> <= ||g|| ||R||. No longer steep."""

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
    """Every one of these rules holds for the same map."""

    def layer(x: Tensor) -> tuple[Tensor, Bound]:
        found: list[tuple[Tensor, Any]] = [one(x) for one in layers]
        return found[0][0], lambda r: torch.stack([bound(r) for _, bound in found]).amin(0)

    return layer
