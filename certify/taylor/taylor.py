"""The Taylor certificate: the image method with the second order computed and only the third order bounded.

The networks of the zoo are nearly quadratic where they are certified; the forms of `certify.image` book several times
the first order for what is mostly not there. Here curvature keeps its sign, so that the quadratic part of the loss
tends to that of the margin's Hessian (trust_region.py), and the effect of hidden units' remainders on later units is
bounded unit by unit (propagated.py, cross.py). Reaches have a second order of their own (reaches.py); rounding is that
of `certify.image`.

The result is the smaller of both bounds. Proof: docs/proofs.md#taylor.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from certify.image.columns import Columns
from certify.image.ellipsoid import Ellipsoids, Grown, Margins
from certify.image.image import Image, ImageAnalysis
from certify.image.joint import Joint
from certify.image.radius_stage import Gradients, RadiusStage, Together
from certify.shared.certificate import Clean
from certify.taylor.forms import smooth_units
from certify.taylor.reaches import CloserEllipsoids
from certify.taylor.trust_region import Terms, terms_of
from zoo.bounds.contracts import Forms, QuadraticForm

MATTER = 0.05  # cost of leaves without exact second order, relative to that of the first order


class TaylorEllipsoids(CloserEllipsoids):
    """The ellipsoids of all leaves; forms of units bound the curvature of either sign."""

    def form_of(self, forms: Forms, g: Tensor, reach: Tensor) -> QuadraticForm:
        units = any(smooth_units(leaf.forms) is not None for leaf in self.tape.leaves.values())
        return forms.signed(g, reach).absolute if units else super().form_of(forms, g, reach)


class Lesser:
    """The bound of this method; or that of `image` if it is less, where leaves without exact second order matter.

    Which images that concerns does not depend on the others of a batch.
    """

    def __init__(self, one: Terms, other: Callable[[], Together]) -> None:
        self._one, self._make = one, other

    @cached_property
    def _other(self) -> Together:
        return self._make()

    def cost(self, e_B: Tensor, grown: Grown) -> Tensor:
        """Return the bound for e <= the largest: (C, B)."""
        cost, matter = self._one.cost(e_B, grown), self._one.free(e_B, grown) > MATTER * self._one.first
        if not bool(matter.any()):
            return cost
        return torch.where(matter, torch.minimum(cost, self._other.cost(e_B, grown)), cost)


class TaylorStage(RadiusStage):
    """A radius stage with these ellipsoids."""

    def bounds(self, joint: Joint, first: Columns | None) -> Ellipsoids:
        return TaylorEllipsoids(joint, self.here.draw, self.here.sizes, self.here.off, first)

    def couple(self, margins: Margins, g: Gradients, first: Tensor) -> Together:
        taylor, image = terms_of(self.ellipsoids, margins, g.leaves, g.image, first), super().couple
        return image(margins, g, first) if taylor is None else Lesser(taylor, lambda: image(margins, g, first))


class TaylorAnalysis(ImageAnalysis):
    """The analysis of a batch of correctly classified images."""

    beyond = 1.15

    def _stage(self, index_I: Tensor, most_B: Tensor) -> RadiusStage:
        return TaylorStage(self._situation(index_I), most_B[index_I], self._columns)


class Taylor(Image):
    """The certifier of one model, used like `Adjoint`. Raises NoRule for the same models."""

    def closer(self, images_BCHW: Tensor, clean: Clean) -> TaylorAnalysis:
        return TaylorAnalysis(self.expand(images_BCHW, clean), images_BCHW, self._seed)
