"""Exact second orders of rivals, most of them with one bound in common.

Bounding what remainders do to later units (propagated.py) takes most of a rival's time. Let rival j have the
coefficients c_j of the b^2 of units, and s_j be about what its first order leaves of its margin. With c the largest
c_j / s_j of near rivals, unit by unit,

    |C_j^(1/2) b|  <=  s_j^(1/2) |C^(1/2) b|,

which is bounded once for all of them. A rival that it leaves open gets a bound of its own.

Proof: docs/proofs.md#taylor. Letters: B images, C rivals of each.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from certify.image.ellipsoid import Ellipsoids, Margins
from certify.image.radius_stage import Formed, Gradients, Situation
from certify.taylor.propagated import Propagated, propagated
from certify.taylor.trust_region import Curved, Terms, terms_of
from zoo.arithmetic import OUT, broadcast_batch
from zoo.bounds.tape import Vectors

NEAREST = 9  # rivals among which the near ones are
NEAR = 8.0  # this multiple of the first order would use up the margin over a near rival
LEAST = 0.1  # least s, as a share of the margin


@dataclass(frozen=True)
class Rival:
    """One rival of every image, with what its bounds are made of."""

    here: Situation
    ellipsoids: Ellipsoids
    class_B: Tensor
    g: Gradients
    margins: Margins

    @staticmethod
    def of(here: Situation, ellipsoids: Ellipsoids, class_B: Tensor) -> "Rival":
        g = here.gradients(class_B[None])
        return Rival(here, ellipsoids, class_B, g, ellipsoids.margins(g.leaves, class_B[None], signed=True))

    @cached_property
    def curved(self) -> Curved:
        return Curved.of(self.ellipsoids, self.margins, self.g.leaves)

    def alone(self) -> Terms:
        numbers, most = self.curved.numbers, self.ellipsoids.most
        return self._with(propagated(self.ellipsoids, self.curved.squares, "propagated", numbers, most))

    def in_common(self, common: Propagated, left_B: Tensor) -> Terms:
        return self._with(common.times((left_B[None] * OUT).sqrt()))

    def _with(self, behind: Propagated) -> Terms:
        g, first = self.g, self.here.ball.length(self.g.image)
        return terms_of(self.ellipsoids, self.margins, g.leaves, g.image, first, self.curved, behind)


@dataclass(frozen=True)
class Bounds:
    """Both bounds of one rival of every image; `near_B` says for which images the one in common holds."""

    class_B: Tensor
    near_B: Tensor
    in_common: Formed
    alone: Formed


class Rivals:
    """The rivals of one radius stage, each made when it is first asked for.

    Which of them have a bound in common depends on the images alone, so that answers do not depend on earlier ones.
    """

    def __init__(
        self,
        here: Situation,
        ellipsoids: Ellipsoids,
        formed: Callable[[Tensor, Gradients, Margins, Callable[[], Terms]], Formed],
    ) -> None:
        self.here, self.ellipsoids, self._formed = here, ellipsoids, formed
        self._others = list[Bounds]()

    def in_common(self, class_B: Tensor, wanted_B: Tensor, bound: Callable[[Formed], Tensor]) -> Tensor:
        """Bound the losses of the wanted rivals that are near; infinite elsewhere: (B,)."""
        return self._least(self._near, class_B, lambda of: wanted_B & of.near_B, lambda of: bound(of.in_common))

    def alone(self, class_B: Tensor, wanted_B: Tensor, bound: Callable[[Formed], Tensor]) -> Tensor:
        """Bound the losses of the wanted rivals by bounds of their own; infinite elsewhere: (B,)."""
        known_B = sum((of.class_B == class_B for of in (*self._near, *self._others)), torch.zeros_like(wanted_B))
        if bool((wanted_B & ~known_B).any()):
            rival = Rival.of(self.here, self.ellipsoids, class_B)
            alone = self._formed(class_B, rival.g, rival.margins, rival.alone)
            self._others.append(Bounds(class_B, torch.zeros_like(wanted_B), alone, alone))
        return self._least((*self._near, *self._others), class_B, lambda _: wanted_B, lambda of: bound(of.alone))

    def _least(
        self,
        known: Iterable[Bounds],
        class_B: Tensor,
        wanted_B: Callable[[Bounds], Tensor],
        bound: Callable[[Bounds], Tensor],
    ) -> Tensor:
        found_B = torch.full_like(self.ellipsoids.most_B, torch.inf)
        for of in known:
            now_B = wanted_B(of) & (of.class_B == class_B)
            if bool(now_B.any()):
                found_B = torch.where(now_B, torch.fmin(bound(of)[0], found_B), found_B)
        return found_B

    @cached_property
    def _near(self) -> list[Bounds]:
        """The near rivals of every image, at most NEAREST."""
        class_CB, e_B = self.here.rivals_BR[:, :NEAREST].mT, self.ellipsoids.most_B
        margin_CB, used_CB = self.here.clean.margin_BJ.gather(1, class_CB.mT).mT, self.here.first(class_CB) * e_B
        near_CB = NEAR * used_CB >= margin_CB
        left_CB = torch.maximum(margin_CB - used_CB, LEAST * margin_CB).clamp_min(1e-100)
        rank_CB = (margin_CB / used_CB).argsort(0)[: int(near_CB.sum(0).max())]
        class_CB, near_CB, left_CB = (of_rivals.gather(0, rank_CB) for of_rivals in (class_CB, near_CB, left_CB))
        rivals = [Rival.of(self.here, self.ellipsoids, class_B) for class_B in class_CB]
        if not rivals:
            return []
        c = _largest([rival.curved.squares for rival in rivals], near_CB, left_CB)
        common = propagated(self.ellipsoids, c, "common", e_B[:, None], self.ellipsoids.most)
        return [
            Bounds(
                rival.class_B,
                near_B,
                self._formed(rival.class_B, rival.g, rival.margins, partial(rival.in_common, common, left_B)),
                self._formed(rival.class_B, rival.g, rival.margins, rival.alone),
            )
            for rival, near_B, left_B in zip(rivals, near_CB, left_CB, strict=True)
        ]


def _largest(squares: list[dict[int, Tensor]], near_CB: Tensor, left_CB: Tensor) -> Vectors:
    """Return the largest c_j / s_j of near rivals j, unit by unit: (1, B, N, H)."""

    def of_leaf(at: int) -> Tensor:
        c_CB = torch.cat([of_rival[at] for of_rival in squares])
        room = c_CB.shape[2:]
        return torch.where(broadcast_batch(near_CB, room), c_CB / broadcast_batch(left_CB, room), 0.0).amax(0, True)

    return {at: of_leaf(at) for at in squares[0]}
