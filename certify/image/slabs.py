"""A ball of images in slabs across the gradient of a margin, each bounded around a center of its own.

No image attains the worst of the first order and that of the remainders: where the first order is large, the image lies
far along the gradient, and what is left of the ball around it is small. Let u be the unit vector that points down the
gradient, and 0 = a_0 < a_1 < ... < a_n numbers, a_n >= max <u, G> on the ball. The G of the ball with
a_k <= <u, G> <= a_k+1 are within

    rho_k = (e^2 - a_k^2)^(1/2)    of the center    x_k = x + a_k u,

and those with <u, G> <= a_1 within e of x. A stage around x_k bounds the fall of the margin of which the gradient along
u is left out, and what that adds within a slab is at most s_k (a_k+1 - a_k), s_k its size. Numbers a_k may be chosen
freely: as far as the slab before allows. Proof: docs/proofs.md#slabs.

Letters: B images, I some of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from certify.adjoint.adjoint import AdjointAnalysis
from certify.image.radius_stage import RadiusStage
from certify.image.situation import Situation, slope
from certify.shared.certificate import of_class
from zoo.arithmetic import OUT, U, broadcast_batch, nan_to_inf, product

MOST = 8  # slabs of one ball
SHARE = 0.9  # of what a slab leaves of the margin that its width may use up


@dataclass(frozen=True)
class Center:
    """The center of a slab: a margin there, its slope along u, and the bound of all else, (I,) each."""

    margin_I: Tensor
    slope_I: Tensor
    rest_I: Tensor
    failure_I: Tensor


@dataclass(frozen=True)
class Slabs:
    """What makes stages around other centers: the adjoint terms of images with these labels, and a stage of them."""

    around: Callable[[Tensor, Tensor], AdjointAnalysis]
    stage: Callable[[Situation, Tensor], RadiusStage]
    seed: bytes

    def losses(self, here: Situation, class_B: Tensor, e_B: Tensor, rest_B: Tensor) -> tuple[Tensor, Tensor]:
        """Bound how far the margins over these classes fall within e, infinite where this proves nothing: (B,).

        `rest_B` is the bound of what is not their first order. Also return the probability that a bound is wrong.
        """
        g = here.gradients(class_B[None]).image[0]
        u = _unit(-g)
        margin_B, end_B = of_class(here.clean.margin_BJ, class_B), product(here.ball.length(u), e_B) * OUT
        center = Center(margin_B, slope(g, u), rest_B, torch.zeros_like(e_B))
        index_I = torch.arange(len(e_B), device=e_B.device)
        a_B, left_B, failure_B = torch.zeros_like(e_B), torch.full_like(e_B, torch.inf), torch.zeros_like(e_B)
        done_B = torch.zeros_like(e_B, dtype=torch.bool)
        for number in range(MOST):
            spare_I = nan_to_inf(center.rest_I).neg() + center.margin_I
            to_end_I = end_B[index_I] - a_B[index_I]
            width_I = torch.minimum(SHARE * spare_I / center.slope_I, to_end_I).nan_to_num(0.0).clamp_min(0)
            left_B[index_I] = torch.minimum(left_B[index_I], spare_I - product(center.slope_I, width_I))
            failure_B[index_I] += center.failure_I
            done_B[index_I] = (spare_I > 0) & (width_I == to_end_I)
            a_B[index_I] += width_I
            near_I = width_I * (MOST - number) > to_end_I  # else the slabs that are left would hardly reach the end
            index_I = index_I[near_I & (width_I < to_end_I)]
            if not len(index_I) or number == MOST - 1:
                break
            center = self._center(here, class_B, u, index_I, a_B[index_I], e_B[index_I], end_B[index_I])
        return torch.where(done_B, margin_B - left_B, torch.inf), failure_B

    def _center(
        self, here: Situation, class_B: Tensor, u: Tensor, index_I: Tensor, a_I: Tensor, e_I: Tensor, end_I: Tensor
    ) -> Center:
        x, u, class_I = here.images[index_I], u[index_I], class_B[index_I]
        inner = self.around(x + broadcast_batch(a_I, x.shape[1:]) * u, here.clean.label_B[index_I])
        center = Situation.of(inner, inner.chain.points[0], torch.arange(len(x), device=x.device), self.seed)
        slope_I, margin_I = slope(center.gradients(class_I[None]).image[0], u), of_class(inner.clean.margin_BJ, class_I)
        off_I = 16 * U * x[0].numel() * (torch.linalg.vector_norm(x.flatten(1), dim=1) + a_I)  # of the center, and of u
        radius_I = ((e_I - a_I).clamp_min(0) * (e_I + a_I)).sqrt() * OUT + off_I
        needed_I = margin_I - product(slope_I, end_I - a_I)  # what the last slab has to leave
        stage = self.stage(_alone(center, class_I, needed_I, u), radius_I)
        loss_IJ = stage.losses(radius_I, torch.full_like(center.clean.margin_BJ, torch.inf))
        rest_I = nan_to_inf(of_class(loss_IJ, class_I) + product(slope_I, off_I))
        return Center(margin_I, slope_I, rest_I, stage.failure_B + inner.failure)


def _alone(here: Situation, class_B: Tensor, margin_B: Tensor, along_BCHW: Tensor) -> Situation:
    """Return the situation with one rival of every image, whose margin does not fall along these vectors."""
    margin_BJ = torch.full_like(here.clean.margin_BJ, torch.inf).scatter(1, class_B[:, None], margin_B[:, None])
    clean = replace(here.clean, margin_BJ=margin_BJ)
    return replace(here, clean=clean, rivals_BR=class_B[:, None], along=along_BCHW)


def _unit(g: Tensor) -> Tensor:
    """Return vectors (B, *x) of these directions that are no longer than 1, whatever the rounding."""
    length_B = torch.linalg.vector_norm(g.flatten(1), dim=1) * (1 + 4 * U * g[0].numel())
    return g / broadcast_batch(length_B.clamp_min(1e-300), g.shape[1:])
