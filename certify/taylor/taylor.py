"""The Taylor certificate: the image method with the second order computed and only the third order bounded.

The networks of the zoo are nearly quadratic where they are certified; the forms of `certify.image` book several times
the first order for what is mostly not there. Here curvature keeps its sign, so that the quadratic part of the loss
tends to that of the margin's Hessian (trust_region.py), and the effect of hidden units' remainders on later units is
bounded unit by unit (propagated.py, cross.py). Reaches have a second order of their own (reaches.py); rounding is that
of `certify.image`.

Most rivals are far, and the bounds of `certify.image` settle them at less cost. So a rival gets this one only where
they leave it open. Proof: docs/proofs.md#taylor.

Letters: B images, J classes, C rivals of each.
"""

from functools import partial

import torch
from torch import Tensor

from certify.image.columns import Columns
from certify.image.ellipsoid import Ellipsoids
from certify.image.image import Image, ImageAnalysis
from certify.image.joint import Joint
from certify.image.radius_stage import Asked, Formed, RadiusStage, Situation
from certify.shared.certificate import Clean, gaps
from certify.taylor.forms import smooth_leaves
from certify.taylor.reaches import CloserEllipsoids
from certify.taylor.trust_region import terms_of
from zoo.arithmetic import nan_to_inf
from zoo.bounds.tape import Tape

BEYOND = 1.25  # first largest e, relative to that of `certify.image`; too large costs little, too small a second stage


class TaylorStage(RadiusStage):
    """A radius stage with exact second orders for the rivals that its other bounds leave open."""

    def __init__(self, here: Situation, most_B: Tensor, first: Columns | None) -> None:
        super().__init__(here, most_B, first)
        self._exact = list[Formed]()

    def bounds(self, joint: Joint, first: Columns | None) -> Ellipsoids:
        return CloserEllipsoids(joint, self.here.draw, self.here.sizes, self.here.off, first)

    def sharper(self, loss_BJ: Tensor, class_CB: Tensor, open_CB: Tensor, asked: Asked) -> Tensor:
        """Lower the losses of open rivals, the worst one of every image first, until one of them stays open."""
        if not has_units(self.here.tape):
            return open_CB.any(0)
        lost_B, open_BC = torch.zeros_like(open_CB[0]), open_CB.mT
        gap_BC = gaps(self.here.clean.margin_BJ, loss_BJ).gather(1, class_CB.mT)
        rank_BC = gap_BC.masked_fill(~open_BC, torch.inf).argsort(1)[:, : int(open_BC.sum(1).max())]
        for some_BC in (rank_BC[:, :1], *rank_BC[:, 1:].split(self.at_once, 1)):
            wanted_BC, class_BC = open_BC.gather(1, some_BC) & ~lost_B[:, None], class_CB.mT.gather(1, some_BC)
            if bool(wanted_BC.any()):
                found_BC = self._exactly(class_BC, wanted_BC, asked).masked_fill(~wanted_BC, torch.inf)
                loss_BJ.scatter_reduce_(1, class_BC, found_BC, "amin")
                lost_B = lost_B | (wanted_BC & self.open(loss_BJ).gather(1, class_BC)).any(1)
        return lost_B

    def _exactly(self, class_BC: Tensor, wanted_BC: Tensor, asked: Asked) -> Tensor:
        """Bound the losses of these rivals; they are formed where the wanted ones are not known yet."""
        unknown_BJ = torch.full_like(self.here.clean.margin_BJ, torch.inf)
        known_BJ = torch.zeros_like(unknown_BJ, dtype=torch.bool)
        for formed in self._exact:
            known_BJ.scatter_(1, formed.class_CB.mT, True)
        if not bool(known_BJ.gather(1, class_BC)[wanted_BC].all()):
            self._exact.append(self._exact_of(class_BC.mT))
        for formed in self._exact:
            found_CB = nan_to_inf(self.together(formed, asked))
            unknown_BJ.scatter_reduce_(1, formed.class_CB.mT, found_CB.mT, "amin")
        return unknown_BJ.gather(1, class_BC)

    def _exact_of(self, class_CB: Tensor) -> Formed:
        g = self.here.gradients(class_CB)
        margins, first = self.ellipsoids.margins(g.leaves, class_CB, signed=True), self.here.ball.length(g.image)
        return self.formed(class_CB, g, margins, partial(terms_of, self.ellipsoids, margins, g.leaves, g.image, first))


class TaylorAnalysis(ImageAnalysis):
    """The analysis of a batch of correctly classified images."""

    @property
    def beyond(self) -> float:
        return BEYOND if has_units(self._whole.tape) else 1.0

    def _stage(self, index_I: Tensor, most_B: Tensor) -> RadiusStage:
        return TaylorStage(self._situation(index_I), most_B[index_I], self._columns)


class Taylor(Image):
    """The certifier of one model, used like `Adjoint`. Raises NoRule for the same models."""

    def closer(self, images_BCHW: Tensor, clean: Clean) -> TaylorAnalysis:
        return TaylorAnalysis(self.expand(images_BCHW, clean), images_BCHW, self._seed)


def has_units(tape: Tape) -> bool:
    """Return whether the model has hidden units whose second order is known exactly."""
    return bool(smooth_leaves(tape))
