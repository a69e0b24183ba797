"""The Taylor certificate: the image method with the second order of hidden units exactly.

The networks of the zoo are nearly quadratic where they are certified; the forms of `certify.image` book several times
the first order for what is mostly not there. Here the curvature of hidden units keeps its sign, so that the quadratic
part of the loss tends to that of the margin's Hessian (coupled.py), and the remainders of units in front are bounded
unit by unit (bent.py). Reaches, rounding and all other leaves, such as attention, are those of `certify.image`.

The result is the smaller of both bounds. Proof: docs/proofs.md#taylor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from certify.image.columns import Columns
from certify.image.ellipsoid import Ellipsoids, Grown, Margins
from certify.image.image import Image, ImageAnalysis
from certify.image.joint import Joint
from certify.image.radius_stage import Gradients, RadiusStage, Together
from certify.shared.certificate import Clean
from certify.taylor.coupled import coupled
from certify.taylor.forms import Curvature, smooth_units
from zoo.bounds.contracts import Forms, QuadraticForm


class TaylorEllipsoids(Ellipsoids):
    """The ellipsoids of all leaves; forms of units bound the curvature of either sign."""

    def form_of(self, forms: Forms, g: Tensor, reach: Tensor) -> QuadraticForm:
        units = smooth_units(forms)
        return super().form_of(forms, g, reach) if units is None else Curvature.of(units, g, reach).absolute


@dataclass(frozen=True)
class Lesser:
    """The lesser of two bounds."""

    one: Together
    other: Together

    def cost(self, e_B: Tensor, grown: Grown) -> Tensor:
        """Return the bound for e <= the largest: (C, B)."""
        return torch.minimum(self.one.cost(e_B, grown), self.other.cost(e_B, grown))


class TaylorStage(RadiusStage):
    """A radius stage with these ellipsoids."""

    def bounds(self, joint: Joint, first: Columns | None) -> Ellipsoids:
        return TaylorEllipsoids(joint, self.here.draw, self.here.sizes, self.here.off, first)

    def couple(self, margins: Margins, g: Gradients, first: Tensor) -> Together:
        taylor = coupled(self.ellipsoids, margins, g.leaves, g.image, first)
        return super().couple(margins, g, first) if taylor is None else taylor


class TaylorAnalysis(ImageAnalysis):
    """The analysis of a batch of correctly classified images."""

    def _stage(self, index_I: Tensor, most_B: Tensor) -> RadiusStage:
        return TaylorStage(self._situation(index_I), most_B[index_I], self._columns)


class Taylor(Image):
    """The certifier of one model, used like `Adjoint`. Raises NoRule for the same models."""

    def closer(self, images_BCHW: Tensor, clean: Clean) -> TaylorAnalysis:
        return TaylorAnalysis(self.expand(images_BCHW, clean), images_BCHW, self._seed)
