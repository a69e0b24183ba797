"""The Taylor certificate: the image method with the second order computed and only the third order bounded.

The networks of the zoo are nearly quadratic where they are certified; the forms of `certify.image` book several times
the first order for what is mostly not there. Here curvature keeps its sign, so that the quadratic part of the loss
tends to that of the margin's Hessian (trust_region.py), and the effect of hidden units' remainders on later units is
bounded unit by unit (propagated.py, cross.py). Reaches have a second order of their own (reaches.py); rounding is that
of `certify.image`.

Most rivals are far, and the bounds of `certify.image` settle them at less cost. So a rival gets this one only where
they leave it open, and one of its own only where the bound in common of the near rivals does so (rivals.py). Proof:
docs/proofs.md#taylor.

Letters: B images, J classes, C rivals of each.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from certify.ellipsoids.budget import at_once, budget
from certify.ellipsoids.columns import Columns
from certify.ellipsoids.joint import Joint
from certify.image.image import Image, ImageAnalysis
from certify.image.radius_stage import Asked, RadiusStage
from certify.reaches.forms import smooth_leaves
from certify.reaches.reaches import CloserEllipsoids
from certify.reaches.triples import ORDERS
from certify.shared.certificate import Clean
from certify.taylor.rivals import Rivals
from zoo.bounds.tape import Tape

BEYOND = 1.25  # first largest e, relative to that of `certify.image`; too large costs little, too small a second stage


class TaylorStage(RadiusStage):
    """A radius stage with exact second orders for the rivals that its other bounds leave open."""

    ellipsoids: CloserEllipsoids

    @property
    def second_orders(self) -> bool:
        return has_units(self.here.tape)

    def bounds(self, joint: Joint, first: Columns | None) -> CloserEllipsoids:
        return CloserEllipsoids(joint, self.here.draw, self.here.sizes, self.here.off, first)

    @property
    def sharper(self) -> Sequence[Callable[[Tensor, Tensor, Asked], Tensor]]:
        known = [self.in_common, self.alone] if has_units(self.here.tape) else []
        return [*known, *super().sharper]

    def in_common(self, class_B: Tensor, wanted_B: Tensor, asked: Asked) -> Tensor:
        return self._rivals.in_common(class_B, wanted_B, partial(self.together, asked=asked))

    def alone(self, class_B: Tensor, wanted_B: Tensor, asked: Asked) -> Tensor:
        """Beyond the largest e there are only estimates, for which the bound in common will do."""
        return self._rivals.alone(class_B, wanted_B & (asked.e_B <= self.most_B), partial(self.together, asked=asked))

    def rest(self, class_B: Tensor, asked: Asked) -> Tensor:
        found_B, known_B = super().rest(class_B, asked), asked.e_B <= self.most_B
        if not has_units(self.here.tape):
            return found_B
        return torch.fmin(found_B, self._rivals.alone(class_B, known_B, lambda of: self.together(of.flat(), asked)))

    @cached_property
    def _rivals(self) -> Rivals:
        return Rivals(self.here, self.ellipsoids, self.formed, self.at_once)


class TaylorAnalysis(ImageAnalysis):
    """The analysis of a batch of correctly classified images."""

    @property
    def beyond(self) -> float:
        return BEYOND if has_units(self._whole.tape) else 1.0

    @property
    def kind(self) -> type[TaylorStage]:
        return TaylorStage


class Taylor(Image):
    """The certifier of one model, used like `Adjoint`. Raises NoRule for the same models."""

    def together(self, images_BCHW: Tensor, clean: Clean) -> int:
        """Return how many images fit the memory, each with what triples do to its forms (triples.py)."""
        few, one = super().together(images_BCHW, clean), torch.arange(len(images_BCHW), device=images_BCHW.device)[:1]
        tape = Tape(self.expand(images_BCHW[one], clean[one]).chain.expansions)
        inputs = [leaf.pull(leaf.y[None])[0].numel() for leaf in tape.leaves.values() if leaf.hessian is not None]
        return min(few, at_once(sum(inputs), len(ORDERS) * budget(tape).probes)) if inputs else few

    def closer(self, images_BCHW: Tensor, clean: Clean) -> TaylorAnalysis:
        return TaylorAnalysis(self.expand(images_BCHW, clean), images_BCHW, self._seed, self.around)


def has_units(tape: Tape) -> bool:
    """Return whether the model has hidden units whose second order is known exactly."""
    return bool(smooth_leaves(tape))
