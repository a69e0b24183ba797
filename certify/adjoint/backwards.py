"""Gradients of margins pulled back through the nodes of a chain, and the losses that follow from them.

For one margin, with ||G_k|| <= e_k and ||R_k(G_{k-1})|| <= beta_k, every cut c bounds the loss on the ball:

    first    ||g_c|| e_c                                                  a part that no better remainder lowers
    coarse   ||g_c|| e_c + sum_{k>c} ||g_k|| beta_k                       gradients alone
    tight    ||g_c|| e_c + sum_{k>c} min( rem_k(e_{k-1}), ||g_k|| beta_k )

||g_0|| is in the norm that is dual to that of the ball of images, and scaled so that this holds (`Ball.length`).

Letters: B images, K nodes, R rivals of every image, P pairs of an image and a rival.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from certify.shared.ball import Ball
from zoo.arithmetic import nan_to_inf, product
from zoo.bounds.contracts import Bound, Expand, Expansion

BATCHES = 8  # batches of pairs that are kept before they are merged


def cuts(first: Tensor, remainders: Tensor) -> Tensor:
    """Return first_c + sum_{k>c} rem_k: (K + 1, ...) and (K, ...) -> (K + 1, ...). The cuts share their sums."""
    behind = torch.cat([remainders.flip(0).cumsum(0).flip(0), torch.zeros_like(first[:1])])
    return nan_to_inf(first + behind)


@dataclass(frozen=True)
class Radii:
    """The radii e_0 .. e_K (B,), the remainders beta_1(e_0) .. beta_K(e_{K-1}) (B,), and the errors contained in both.

    `off` is the error of clean points and of pulled gradients.
    """

    e: Sequence[Tensor]
    beta: Sequence[Tensor]
    off: Sequence[Tensor]

    def of(self, image_P: Tensor, wanted_P: Tensor | float = 1.0) -> "Radii":
        """Return the radii of some images, 0 where not wanted: a radius of 0 costs nothing."""

        def some(values: Sequence[Tensor]) -> list[Tensor]:
            return [product(torch.as_tensor(wanted_P), value_B[image_P]) for value_B in values]

        return Radii(some(self.e), some(self.beta), some(self.off))


@dataclass(frozen=True)
class Chain:
    """The nodes of a model around clean inputs X_0 .. X_{K-1}; X_K is the last. `ball` is that of the images X_0."""

    ball: Ball
    nodes: Sequence[Expand]
    points: Sequence[Tensor]
    expansions: Sequence[Expansion]

    def of(self, image_P: Tensor) -> "Chain":
        """Return the chain around some of the images; an image may occur more than once."""
        points = [x[image_P] for x in self.points]
        return Chain(self.ball, self.nodes, points, [expand(x) for expand, x in zip(self.nodes, points, strict=False)])

    def lengths(self, g: Tensor) -> Tensor:
        """Pull g (R, B, ...) back from X_K; return the lengths ||g_k|| (K + 1, R, B), k = 0 .. K."""
        found = [_length(g)]
        for expansion in reversed(self.expansions):
            g = expansion.pull(g)
            found.append(_length(g))
        found[-1] = self.ball.length(g)
        return torch.stack(found[::-1])

    def remainders(self, g: Tensor) -> list[Bound]:
        """Pull g (R, B, ...) back from X_K; return the remainders rem_k as functions of radii (R, B), k = 1 .. K."""
        found = []
        for expansion in reversed(self.expansions):
            found.append(expansion.remainder(g))
            g = expansion.pull(g)
        return found[::-1]


def _length(g: Tensor) -> Tensor:
    """Return the L2 length of each gradient: (R, B, ...) -> (R, B)."""
    return torch.linalg.vector_norm(g.flatten(2), dim=-1)


@dataclass(frozen=True)
class Pairs:
    """Some pairs of an image and a rival, with their remainders."""

    image_P: Tensor
    lengths: Tensor  # (K + 1, P)
    bounds: Sequence[Bound]  # (1, P) -> (1, P)

    def remainders(self, here: Radii) -> Tensor:
        """Return the remainders at radii (P,): (K, P)."""
        found = [
            torch.fmin(bound(e_P[None])[0] + product(length_P, off_P), product(length_P, beta_P))
            for bound, e_P, length_P, beta_P, off_P in zip(
                self.bounds, here.e, self.lengths[1:], here.beta, here.off, strict=False
            )
        ]
        return torch.stack(found)

    def losses(self, here: Radii) -> Tensor:
        """Return the loss at the best cut: (P,)."""
        return cuts(product(self.lengths, torch.stack(list(here.e))), self.remainders(here)).amin(0)


class Rivals:
    """A few rivals of every image, with the gradients g_RBD of their margins at X_K.

    Remainders are computed for the requested pairs, and kept for at most `few` pairs.
    """

    def __init__(self, chain: Chain, g_RBD: Tensor, few: int) -> None:
        self._chain, self._g, self._few = chain, g_RBD, few
        self.lengths = chain.lengths(g_RBD.view(len(g_RBD), *chain.points[-1].shape))
        self._held_RB = torch.zeros(g_RBD.shape[:2], dtype=torch.bool, device=g_RBD.device)
        self._held: list[tuple[Tensor, Pairs]] = []

    def first(self, radii: Radii) -> Tensor:
        """Return the first-order costs of all cuts: (K + 1, R, B)."""
        return product(self.lengths, torch.stack(list(radii.e))[:, None])

    def coarse(self, radii: Radii) -> Tensor:
        """Return the losses by gradients alone: (R, B)."""
        return cuts(self.first(radii), product(self.lengths[1:], torch.stack(list(radii.beta))[:, None])).amin(0)

    def tight(self, radii: Radii, wanted_RB: Tensor) -> Tensor:
        """Return the losses by remainders: (R, B), infinite where not wanted."""
        loss_RB = torch.full_like(self.lengths[0], torch.inf)
        for rank_P, pairs in self._with(wanted_RB):
            wanted_P = wanted_RB[rank_P, pairs.image_P]
            loss_P = pairs.losses(radii.of(pairs.image_P, wanted_P.to(loss_RB)))
            loss_RB[rank_P, pairs.image_P] = torch.where(wanted_P, loss_P, torch.inf)
        return loss_RB

    def _with(self, wanted_RB: Tensor) -> Iterable[tuple[Tensor, Pairs]]:
        """Return batches that hold the wanted pairs: those computed before, and one of the new pairs.

        Too many batches are recomputed as one. If there are more than `few` pairs, the wanted ones are computed a few
        at a time and not kept.
        """
        new_RB = wanted_RB & ~self._held_RB
        if bool(new_RB.any()):
            together_RB = wanted_RB | self._held_RB
            if int(together_RB.sum()) > self._few:
                return (self.pairs(*some.unbind(1)) for some in wanted_RB.nonzero().split(self._few))
            if len(self._held) == BATCHES:
                self._held, new_RB = [], together_RB
            self._held.append(self.pairs(*new_RB.nonzero().unbind(1)))
            self._held_RB = together_RB
        return [held for held in self._held if bool(wanted_RB[held[0], held[1].image_P].any())]

    def pairs(self, rank_P: Tensor, image_P: Tensor) -> tuple[Tensor, Pairs]:
        """Compute these pairs anew."""
        chain = self._chain.of(image_P)
        bounds = chain.remainders(self._g[rank_P, image_P].view(1, *chain.points[-1].shape))
        return rank_P, Pairs(image_P, self.lengths[:, rank_P, image_P], bounds)
