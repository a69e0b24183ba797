"""Margins of a few images on the ball of images, for all radii up to a largest one.

Letters: B images, J classes, C rivals of each, R all rivals, the closest first; e the radius of an L2 ball.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor, nn

from certify.adjoint.adjoint import AdjointAnalysis, groups
from certify.image.budget import at_once, budget
from certify.image.columns import Columns
from certify.image.coupled import coupled
from certify.image.ellipsoid import Ellipsoids, Grown, Margins, Off
from certify.image.joint import Joint, Sizes
from certify.image.weights import estimate_weights
from certify.shared.ball import Ball
from certify.shared.certificate import Clean, gaps, open_pairs, pair_weights
from zoo.arithmetic import nan_to_inf, product
from zoo.bounds import lanczos
from zoo.bounds.tape import Tape, Vectors

AT_ONCE = 9  # largest number of rivals bounded together: all of ten classes
BITS = 2**12  # leading bits of a number that enter a seed
TRIES = 6  # steps of the search for the radius that a stage proves
STRIDE = 1.25  # factor of a step while the search has no bracket
FINE = 1.06  # high / low at which it ends


@dataclass(frozen=True)
class Gradients:
    """The gradients of some margins, at the image (C, B, *x) and at some leaves; their lengths (C, B) at all leaves."""

    image: Tensor
    leaves: Vectors
    lengths: Sizes


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Some images, and what is known around them."""

    images: Tensor
    clean: Clean
    ball: Ball
    tape: Tape
    head: nn.Linear
    rivals_BR: Tensor
    seed: bytes
    radii: Callable[[Tensor], Sequence[Tensor]]  # e (B,) -> |G_n| (B,) before every node, or an empty list
    proved: Callable[[Tensor], Tensor]  # e (B,) -> (B,): proved by the adjoint analysis, so that no stage is needed
    off: Off  # error at the end of a node
    kept: Callable[[Tensor], Tensor]  # r (B,) -> (B, J): rounding to subtract from margins, for features within r

    @staticmethod
    def of(inner: AdjointAnalysis, images: Tensor, index_I: Tensor, seed: bytes) -> "Situation":
        tape = Tape((inner.chain if len(index_I) == len(images) else inner.chain.of(index_I)).expansions)
        asked = not budget(tape).large  # for a large model the adjoint analysis is not used

        def of_all(e_I: Tensor) -> Tensor:
            return images.new_zeros(len(images), dtype=e_I.dtype).index_put((index_I,), e_I)

        def radii(e_I: Tensor) -> list[Tensor]:
            return [radius_B[index_I] for radius_B in inner.radii_within(of_all(e_I)).e] if asked else []

        def proved(e_I: Tensor) -> Tensor:
            if not asked:
                return torch.zeros_like(e_I, dtype=torch.bool)
            now, loss_BJ, _ = inner.answered(of_all(e_I))
            return ~open_pairs(now, loss_BJ).any(-1)[index_I]

        def off(node: int, r_I: Tensor) -> Tensor:
            return nan_to_inf(inner.off_behind(node, of_all(r_I))[index_I])

        def kept(r_I: Tensor) -> Tensor:
            return nan_to_inf(inner.kept(of_all(r_I))[index_I])

        return Situation(
            images=images[index_I],
            clean=inner.clean[index_I],
            ball=inner.ball,
            tape=tape,
            head=inner.head,
            rivals_BR=inner.rivals_BR[index_I],
            seed=seed,
            radii=radii,
            proved=proved,
            off=off,
            kept=kept,
        )

    def gradients(self, class_CB: Tensor) -> "Gradients":
        """Return the gradients of the margins over these classes.

        They are taken at the image and at the outputs of the nonlinear leaves; lengths are those at the outputs of all
        leaves.
        """
        weight, lengths = self.head.weight, Sizes()
        g_CBD = weight[self.clean.label_B] - weight[class_CB]
        end = self.tape.leaves[max(self.tape.leaves)].y.shape

        def visit(at: int, g: Tensor) -> None:
            lengths[at] = torch.linalg.vector_norm(g.flatten(2), dim=-1)

        return Gradients(*self.tape.pull(g_CBD.view(len(g_CBD), *end), {}, self.tape.nonlinear, visit), lengths)

    def first(self, class_CB: Tensor) -> Tensor:
        """Return the first-order loss of the margins over these classes at e = 1: (C, B)."""
        return self.ball.length(self.gradients(class_CB).image)

    def sizes(self, e_B: Tensor) -> Sizes:
        """Return bounds on the inputs of leaves within e, for the leaves that the adjoint analysis bounds."""
        ways = zip(self.tape.gains, self.radii(e_B), strict=False)
        return {at: product(radius_B, gain_B) for gains, radius_B in ways for at, gain_B in gains.items()}

    def draw(self, room: torch.Size, word: str, numbers: Tensor) -> Tensor:
        """Return a Gaussian vector (B, *room) for each image.

        Every purpose, with these numbers (B, n), has its own random stream, because the result of one start chooses the
        maps that another one measures. Only the leading bits of the numbers enter the seed, as the trailing ones are
        rounding.
        """
        mantissa, exponent = numbers.frexp()
        key = torch.cat([self.images.flatten(1), (BITS * mantissa).round(), exponent], 1)
        return lanczos.starts(key, room, self.seed + word.encode())

    def features(self, e_B: Tensor, moved_B: Tensor) -> Tensor:
        """Bound how far the features move, by the forms' bound `moved_B` or by the adjoint radius: (B,)."""
        return torch.fmin(moved_B, radii[-1]) if (radii := self.radii(e_B)) else moved_B


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

    `first` holds the reaches of the first leaf's functionals, where they are known.
    """

    def __init__(self, here: Situation, most_B: Tensor, first: Columns | None) -> None:
        self.here, self.most_B = here, most_B
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
        if self.ellipsoids.budget.large:  # in smaller models the adjoint analysis settles the far rivals
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
        rounded_CB = self._rounded(formed, formed.class_CB, asked)
        remainders_CB = self.ellipsoids.cost(formed.margins, asked.grown)
        open_CB = self._lowered(loss_BJ, formed, product(formed.first, asked.e_B) + rounded_CB + remainders_CB)
        if formed.margins.forms and bool((open_CB & ~lost_B).any()):
            open_CB = self._lowered(
                loss_BJ, formed, self.together(formed, asked).masked_fill(~open_CB | lost_B, torch.inf)
            )
        return lost_B | self.sharper(loss_BJ, formed.class_CB, open_CB & ~lost_B, asked)

    def together(self, formed: Formed, asked: Asked) -> Tensor:
        """Bound the losses of these rivals by first order and remainders together: (C, B)."""
        beside_CB = self.ellipsoids.beside_forms(formed.margins, asked.grown)
        return formed.coupled.cost(asked.e_B, asked.grown) + self._rounded(formed, formed.class_CB, asked) + beside_CB

    def sharper(self, loss_BJ: Tensor, class_CB: Tensor, open_CB: Tensor, asked: Asked) -> Tensor:
        """Lower the losses of these open rivals in place, if there is a tighter bound; return whose stay open: (B,)."""
        return open_CB.any(0)

    def _lowered(self, loss_BJ: Tensor, formed: Formed, found_CB: Tensor) -> Tensor:
        """Enter these losses where they are smaller; return which of the rivals stay open."""
        loss_BJ.scatter_reduce_(1, formed.class_CB.mT, nan_to_inf(found_CB).mT, "amin")
        return self.open(loss_BJ).gather(1, formed.class_CB.mT).mT

    def open(self, loss_BJ: Tensor) -> Tensor:
        return open_pairs(self.here.clean, loss_BJ)
