"""Exact second orders of rivals, most of them with one bound in common.

Bounding what remainders do to later units (propagated.py) takes most of a rival's time. Let rival j have the
coefficients c_j of the b^2 of units, and s_j be about what its first order leaves of its margin. With c the largest
c_j / s_j of near rivals, unit by unit,

    |C_j^(1/2) b|  <=  s_j^(1/2) |C^(1/2) b|,

which is bounded once for all of them. A rival that it leaves open gets a bound of its own.

Proof: docs/proofs.md#taylor. Letters: B images, C rivals of each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from certify.ellipsoids.ellipsoid import Margins
from certify.image.radius_stage import Formed
from certify.image.situation import Gradients, Situation
from certify.reaches.propagated import Propagated, propagated
from certify.reaches.reaches import CloserEllipsoids
from certify.taylor.beside import Beside
from certify.taylor.curved import Curved
from certify.taylor.trust_region import Terms, terms_of
from zoo.arithmetic import OUT, broadcast_batch
from zoo.bounds.tape import Vectors

NEAREST = 9  # rivals among which the near ones are
NEAR = 8.0  # this multiple of the first order would use up the margin over a near rival
LEAST = 0.1  # least s, as a share of the margin


@dataclass(frozen=True)
class Rival:
    """One rival of every image, with what its bounds are made of."""

    here: Situation
    ellipsoids: CloserEllipsoids
    class_B: Tensor
    g: Gradients
    margins: Margins
    curved: Curved

    @staticmethod
    def of(here: Situation, ellipsoids: CloserEllipsoids, class_CB: Tensor) -> list["Rival"]:
        """Return these rivals; together they take less time than one by one."""
        g = [here.gradients(class_B[None]) for class_B in class_CB]
        margins = ellipsoids.signed_margins([of_one.leaves for of_one in g], class_CB)
        curved = Curved.of(ellipsoids, [(one, of_one.leaves) for one, of_one in zip(margins, g, strict=True)])
        return [Rival(here, ellipsoids, *parts) for parts in zip(class_CB, g, margins, curved, strict=True)]

    @cached_property
    def beside(self) -> Beside:
        return Beside.of(self.ellipsoids, self.margins, self.curved)

    def alone(self) -> Terms:
        numbers, most = self.curved.numbers, self.ellipsoids.most
        return self._with(propagated(self.ellipsoids, self.curved.squares, "propagated", numbers, most))

    def in_common(self, common: Propagated, left_B: Tensor) -> Terms:
        return self._with(common.times((left_B[None] * OUT).sqrt()))

    def _with(self, behind: Propagated) -> Terms:
        g_0, first = self.g.image, self.here.ball.length(self.g.image)
        return terms_of(self.ellipsoids, self.margins, g_0, first, self.curved, self.beside, behind)


@dataclass(frozen=True)
class Known:
    """A bound of one rival of every image, for the images `of_B`."""

    class_B: Tensor
    of_B: Tensor
    formed: Formed


class Rivals:
    """The rivals of one radius stage, each made when it is first asked for.

    Which of them have a bound in common depends on the images alone, so that answers do not depend on earlier ones.
    """

    def __init__(
        self,
        here: Situation,
        ellipsoids: CloserEllipsoids,
        formed: Callable[[Tensor, Gradients, Margins, Callable[[], Terms]], Formed],
        at_once: int,
    ) -> None:
        self.here, self.ellipsoids, self._formed, self._at_once = here, ellipsoids, formed, at_once

    def in_common(self, class_B: Tensor, wanted_B: Tensor, bound: Callable[[Formed], Tensor]) -> Tensor:
        """Bound the losses of the wanted rivals that are near; infinite elsewhere: (B,)."""
        return self._least(self._common, class_B, wanted_B, bound)

    def alone(self, class_B: Tensor, wanted_B: Tensor, bound: Callable[[Formed], Tensor]) -> Tensor:
        """Bound the losses of the wanted rivals by bounds of their own; infinite elsewhere: (B,)."""
        known_B = sum((one.class_B == class_B for one in self._own), torch.zeros_like(wanted_B))
        if bool((wanted_B & ~known_B).any()):
            self._own += map(self._alone, Rival.of(self.here, self.ellipsoids, class_B[None]))
        return self._least(self._own, class_B, wanted_B, bound)

    def _least(
        self, known: list[Known], class_B: Tensor, wanted_B: Tensor, bound: Callable[[Formed], Tensor]
    ) -> Tensor:
        found_B = torch.full_like(self.ellipsoids.most_B, torch.inf)
        for one in known:
            now_B = wanted_B & one.of_B & (one.class_B == class_B)
            if bool(now_B.any()):
                found_B = torch.where(now_B, torch.fmin(bound(one.formed)[0], found_B), found_B)
        return found_B

    @cached_property
    def _near(self) -> list[tuple[Rival, Tensor, Tensor]]:
        """The near rivals, at most NEAREST of every image, with the images for which they are near, and s.

        A single rival is not near, as its bound in common would be its own.
        """
        if self.here.rivals_BR.shape[1] == 1:
            return []
        class_CB, e_B = self.here.rivals_BR[:, :NEAREST].mT, self.ellipsoids.most_B
        margin_CB, used_CB = self.here.clean.margin_BJ.gather(1, class_CB.mT).mT, self.here.first(class_CB) * e_B
        near_CB = NEAR * used_CB >= margin_CB
        left_CB = torch.maximum(margin_CB - used_CB, LEAST * margin_CB).clamp_min(1e-100)
        rank_CB = (margin_CB / used_CB).argsort(0)[: int(near_CB.sum(0).max())]
        class_CB, near_CB, left_CB = (of_rivals.gather(0, rank_CB) for of_rivals in (class_CB, near_CB, left_CB))
        few = class_CB.split(self._at_once) if len(class_CB) else ()
        rivals = [rival for some_CB in few for rival in Rival.of(self.here, self.ellipsoids, some_CB)]
        return list(zip(rivals, near_CB, left_CB, strict=True))

    @cached_property
    def _common(self) -> list[Known]:
        if not self._near:
            return []
        numbers = self.ellipsoids.most_B[:, None]
        common = propagated(self.ellipsoids, _largest(self._near), "common", numbers, self.ellipsoids.most)
        return [
            self._known(rival, near_B, partial(rival.in_common, common, left_B)) for rival, near_B, left_B in self._near
        ]

    @cached_property
    def _own(self) -> list[Known]:
        return [self._alone(rival) for rival, _, _ in self._near]

    def _alone(self, rival: Rival) -> Known:
        return self._known(rival, torch.ones_like(self.here.clean.correct_B), rival.alone)

    def _known(self, rival: Rival, of_B: Tensor, couple: Callable[[], Terms]) -> Known:
        return Known(rival.class_B, of_B, self._formed(rival.class_B[None], rival.g, rival.margins, couple))


def _largest(near: list[tuple[Rival, Tensor, Tensor]]) -> Vectors:
    """Return the largest c_j / s_j of near rivals j, unit by unit: (1, B, N, H)."""
    largest = Vectors()
    for rival, near_B, left_B in near:
        for at, c in rival.curved.squares.items():
            room = c.shape[2:]
            share = torch.where(broadcast_batch(near_B, room), c / broadcast_batch(left_B, room), 0.0)
            largest[at] = torch.maximum(largest[at], share) if at in largest else share
    return largest
