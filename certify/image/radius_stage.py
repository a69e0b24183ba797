"""Margins of a few images on the ball of images, for all radii up to a largest one.

Letters: B images, J classes, C rivals of each, R all rivals, the closest first; e the radius of an L2 ball.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from certify.adjoint.adjoint import groups
from certify.ellipsoids.budget import at_once
from certify.ellipsoids.columns import Columns
from certify.ellipsoids.ellipsoid import Ellipsoids, Grown, Margins
from certify.ellipsoids.joint import Joint
from certify.ellipsoids.weights import estimate_weights
from certify.image.coupled import coupled
from certify.image.situation import Gradients, Situation
from certify.shared.certificate import gaps, open_pairs, pair_weights
from zoo.arithmetic import nan_to_inf, product
from zoo.bounds import lanczos
from zoo.bounds.tape import Vectors

AT_ONCE = 9  # largest number of rivals bounded together: all of ten classes
TRIES = 6  # steps of the search for the radius that a stage proves
STRIDE = 1.25  # factor of a step while the search has no bracket
FINE = 1.06  # high / low at which it ends


@dataclass(frozen=True)
class Group:
    """Some rivals of every image, described by their gradients alone: (C, B) each."""

    first: Tensor
    at_ends: Sequence[Tensor]
    slip: Tensor
    lengths: Vectors


class Together(Protocol):
    """A bound of the loss to first order and of the forms' remainders together."""

    def cost(self, e_B: Tensor, grown: Grown) -> Tensor:
        """Return the bound for e <= the largest: (C, B)."""
        ...

    def flat(self) -> "Together":
        """Return the bound for margins without their gradients at the image."""
        ...


class Cut(Protocol):
    """Bounds of margins over one rival of every image, part by part of the ball (slabs.py)."""

    def losses(self, here: Situation, class_B: Tensor, e_B: Tensor, rest_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bounds, and the probability that one is wrong; `rest_B` is that of all but the first order."""
        ...


@dataclass
class Formed:
    """Some rivals of every image, with what their remainders can cost: (C, B) each.

    `coupled` bounds remainders and the first order together; it is computed on first use.
    """

    class_CB: Tensor
    first: Tensor
    at_ends: Sequence[Tensor]
    slip: Tensor
    margins: Margins
    couple: Callable[[], Together]

    @cached_property
    def coupled(self) -> Together:
        return self.couple()

    def flat(self) -> "Formed":
        """Return the same of the margins without their gradients at the image."""
        return replace(self, first=torch.zeros_like(self.first), couple=lambda: self.coupled.flat())


@dataclass(frozen=True)
class Asked:
    """The quantities at one e.

    `grown` has the bounds of the forms, `moved_B` bounds the move of the features, and `kept_BJ` what rounding takes
    from margins.
    """

    e_B: Tensor
    grown: Grown
    moved_B: Tensor
    kept_BJ: Tensor


class RadiusStage:
    """The bounds of some images for all e up to `most_B`.

    `first` holds the reaches of the first leaf's functionals, where they are known. `cut` bounds the rivals that all
    else leaves open.
    """

    def __init__(self, here: Situation, most_B: Tensor, first: Columns | None, cut: Cut | None = None) -> None:
        self.here, self.most_B, self._cut = here, most_B, cut
        self._failure_B = torch.zeros_like(most_B)  # of the parts of balls
        g = here.gradients(here.rivals_BR[:, :1].mT)
        estimate = estimate_weights(here.tape, here.images, most_B, g.leaves, here.draw, here.sizes, self.second_orders)
        joint = estimate.joint(here.off)
        self.ellipsoids = self.bounds(joint, first)
        room = self.ellipsoids.joint.room(here.tape.nonlinear[-1]) * len(here.images)
        self.at_once = min(AT_ONCE, at_once(room * lanczos.STARTS, lanczos.STEPS[-1]))
        self._groups = dict[int, Group]()
        self._formed = list[Formed]()

    @property
    def second_orders(self) -> bool:
        """True where the bounds know the second order of leaves with a Hessian."""
        return False

    def bounds(self, joint: Joint, first: Columns | None) -> Ellipsoids:
        """Return the ellipsoids of these maps."""
        return Ellipsoids(joint, self.here.draw, self.here.sizes, self.here.off, first)

    @property
    def failure_B(self) -> Tensor:
        """The probability that a bound of an image is wrong: (B,)."""
        return self._failure_B + self.ellipsoids.failure

    @cached_property
    def reach_B(self) -> Tensor:
        """About the largest e that the bounds of this stage prove; above `most_B`, where they do not hold, an estimate.

        Maps of a larger e have larger remainders, so that the estimate is rather too large.
        """
        unknown_BJ = torch.full_like(self.here.clean.margin_BJ, torch.inf)
        low_B, high_B, e_B = torch.zeros_like(self.most_B), torch.full_like(self.most_B, torch.inf), self.most_B
        for _ in range(TRIES):
            won_B = ~self.open(self.losses(e_B, unknown_BJ)).any(-1)
            low_B, high_B = torch.where(won_B, torch.maximum(low_B, e_B), low_B), torch.where(won_B, high_B, e_B)
            found_B = high_B < FINE * low_B
            if bool(found_B.all()):
                break
            middle_B = torch.where(torch.isinf(high_B), STRIDE * low_B, (low_B * high_B).sqrt())
            e_B = torch.where(found_B, 0.0, torch.where(low_B > 0, middle_B, high_B / STRIDE))  # 0 costs nothing
        return low_B

    def losses(self, e_B: Tensor, loss_BJ: Tensor) -> Tensor:
        """Return the losses of margins, lowered where this stage proves less.

        Rivals are bounded from the closest on, until one of them stays open.
        """
        here, loss_BJ = self._asked(e_B), loss_BJ.clone()
        # The adjoint analysis settles far rivals of smaller models. Pairs of features bound whole margins only.
        if self.ellipsoids.budget.large and self.here.along is None:
            loss_BJ = torch.minimum(loss_BJ, self._of_pairs(here))
        lost_B = torch.zeros_like(self.here.clean.correct_B)
        for formed in self._formed:
            lost_B = self._lower(loss_BJ, formed, lost_B, here)
        for start, end in groups(self.here.rivals_BR.shape[1]):
            class_CB = self.here.rivals_BR[:, start:end].mT
            if bool((self.open(loss_BJ).gather(1, class_CB.mT).mT & ~lost_B).any()):
                cheap_CB = self._cheap(class_CB, start, here)
                loss_BJ = loss_BJ.scatter_reduce(1, class_CB.mT, cheap_CB.mT, "amin")
                lost_B = self._form(class_CB, loss_BJ, lost_B, here)
        return loss_BJ

    def _asked(self, e_B: Tensor) -> Asked:
        grown = self.ellipsoids.at(e_B)
        moved_B = self.here.features(e_B, self.ellipsoids.end(grown) + grown.defects[-1])
        return Asked(e_B, grown, moved_B, self.here.kept(moved_B))

    def _of_pairs(self, asked: Asked) -> Tensor:
        """Bound the losses by how far the features move: (B, J)."""
        weight_BJ = pair_weights(self.here.head, self.here.clean.label_B)
        return nan_to_inf(product(weight_BJ, asked.moved_B[:, None]) + asked.kept_BJ)

    def _cheap(self, class_CB: Tensor, start: int, asked: Asked) -> Tensor:
        """Bound the losses of these rivals by their gradients alone."""
        if start not in self._groups:
            g = self.here.gradients(class_CB)
            first, lengths = self.here.ball.length(g.image), self.ellipsoids.lengths(g.leaves)
            self._groups[start] = Group(first, self._at_ends(g), self.ellipsoids.slip(g.lengths), lengths)
        group = self._groups[start]
        total_CB = product(group.first, asked.e_B) + self._rounded(group, class_CB, asked)
        for at, lengths_CB in group.lengths.items():
            total_CB = total_CB + product(lengths_CB, asked.grown.theta[at].sqrt())
        return nan_to_inf(total_CB)

    def _form(self, class_CB: Tensor, loss_BJ: Tensor, lost_B: Tensor, asked: Asked) -> Tensor:
        """Lower the losses of the open rivals by forms, the worst rival of every image first; return the lost images.

        An image is lost as soon as one of its rivals stays open.
        """
        for most in (1, len(class_CB)):
            open_BC = self.open(loss_BJ).gather(1, class_CB.mT)
            wanted_BC = open_BC & ~lost_B[:, None]
            gap_BC = gaps(self.here.clean.margin_BJ, loss_BJ).gather(1, class_CB.mT)
            rank_BC = gap_BC.masked_fill(~wanted_BC, torch.inf).argsort(1)
            for some_BC in rank_BC[:, : min(most, int(wanted_BC.sum(1).max()))].split(self.at_once, 1):
                if some_BC.numel():
                    self._formed.append(self._formed_of(class_CB.mT.gather(1, some_BC).mT))
                    lost_B = self._lower(loss_BJ, self._formed[-1], lost_B, asked)
        return lost_B

    def _formed_of(self, class_CB: Tensor) -> Formed:
        g = self.here.gradients(class_CB)
        margins, first = self.ellipsoids.margins(g.leaves, class_CB), self.here.ball.length(g.image)
        return self.formed(class_CB, g, margins, partial(coupled, self.ellipsoids, margins, g.image, first))

    def formed(self, class_CB: Tensor, g: Gradients, margins: Margins, couple: Callable[[], Together]) -> Formed:
        """Return the terms of these rivals, `couple` being the bound of the first order and remainders together."""
        first = self.here.ball.length(g.image)
        return Formed(class_CB, first, self._at_ends(g), self.ellipsoids.slip(g.lengths), margins, couple)

    def _at_ends(self, g: Gradients) -> list[Tensor]:
        """Return the lengths of the gradients at the ends of nodes."""
        return [g.lengths[leaves[-1]] for leaves in self.here.tape.of_nodes]

    def _rounded(self, rivals: Group | Formed, class_CB: Tensor, asked: Asked) -> Tensor:
        """Return the cost of rounding at the ends of nodes, in gradients and in the head: (C, B)."""
        ends = zip(rivals.at_ends, asked.grown.defects, strict=True)
        total_CB = product(rivals.slip, self.ellipsoids.whole(asked.grown)) + asked.kept_BJ.gather(1, class_CB.mT).mT
        return sum((product(length_CB, defect_B) for length_CB, defect_B in ends), total_CB)

    def _lower(self, loss_BJ: Tensor, formed: Formed, lost_B: Tensor, asked: Asked) -> Tensor:
        """Lower the losses of these rivals in place; return the images that are lost with them.

        The joint bound of first order and remainders is computed only for rivals that the separate bounds leave open.
        Whether it is used is decided image by image, so an answer does not depend on the other images.
        """
        open_CB = self._lowered(loss_BJ, formed, self._apart(formed, asked))
        if formed.margins.forms and bool((open_CB & ~lost_B).any()):
            open_CB = self._lowered(
                loss_BJ, formed, self.together(formed, asked).masked_fill(~open_CB | lost_B, torch.inf)
            )
        return lost_B | self._sharper(loss_BJ, formed.class_CB, open_CB & ~lost_B, asked)

    def _apart(self, formed: Formed, asked: Asked) -> Tensor:
        """Bound the losses of these rivals by first order and remainders, the worst of each: (C, B)."""
        rounded_CB = self._rounded(formed, formed.class_CB, asked)
        return product(formed.first, asked.e_B) + rounded_CB + self.ellipsoids.cost(formed.margins, asked.grown)

    def together(self, formed: Formed, asked: Asked) -> Tensor:
        """Bound the losses of these rivals by first order and remainders together: (C, B)."""
        beside_CB = self.ellipsoids.beside_forms(formed.margins, asked.grown)
        return formed.coupled.cost(asked.e_B, asked.grown) + self._rounded(formed, formed.class_CB, asked) + beside_CB

    def _sharper(self, loss_BJ: Tensor, class_CB: Tensor, open_CB: Tensor, asked: Asked) -> Tensor:
        """Lower the losses of these open rivals in place, until one stays open; return the images where one does."""
        lost_B = torch.zeros_like(open_CB[0])
        for class_B, open_B in zip(class_CB, open_CB, strict=True):
            open_B = open_B & ~lost_B
            for bound in self.sharper:
                if bool(open_B.any()):
                    loss_BJ.scatter_reduce_(1, class_B[:, None], bound(class_B, open_B, asked)[:, None], "amin")
                    open_B = open_B & self.open(loss_BJ).gather(1, class_B[:, None])[:, 0]
            lost_B = lost_B | open_B
        return lost_B

    @property
    def sharper(self) -> Sequence[Callable[[Tensor, Tensor, Asked], Tensor]]:
        """Bounds (class_B, wanted_B, asked) -> (B,) for single rivals, tried one after another."""
        return [self.by_parts] if self._cut else []

    def by_parts(self, class_B: Tensor, wanted_B: Tensor, asked: Asked) -> Tensor:
        """Bound the losses of the wanted rivals part by part; infinite elsewhere."""
        assert self._cut is not None
        rest_B = torch.where(wanted_B, self.rest(class_B, asked), torch.inf)
        loss_B, failure_B = self._cut.losses(self.here, class_B, asked.e_B, rest_B)
        self._failure_B += failure_B
        return loss_B

    def rest(self, class_B: Tensor, asked: Asked) -> Tensor:
        """Bound how far the margins over these classes fall beyond their first order: (B,)."""
        found_B = torch.full_like(asked.e_B, torch.inf)
        for formed in self._formed:
            flat = formed.flat()
            loss_CB = self._apart(flat, asked)
            if formed.margins.forms:
                loss_CB = torch.fmin(loss_CB, self.together(flat, asked))
            found_B = torch.fmin(found_B, loss_CB.masked_fill(formed.class_CB != class_B, torch.inf).amin(0))
        return nan_to_inf(found_B)

    def _lowered(self, loss_BJ: Tensor, formed: Formed, found_CB: Tensor) -> Tensor:
        """Enter these losses where they are smaller; return which of the rivals stay open."""
        loss_BJ.scatter_reduce_(1, formed.class_CB.mT, nan_to_inf(found_CB).mT, "amin")
        return self.open(loss_BJ).gather(1, formed.class_CB.mT).mT

    def open(self, loss_BJ: Tensor) -> Tensor:
        return open_pairs(self.here.clean, loss_BJ)
