"""A ball of images in slabs across the gradient of a margin, each bounded around a center of its own.

No image attains the worst of the first order and that of the remainders: where the first order is large, the image lies
far along the gradient, and what is left of the ball around it is small. Let u be the unit vector that points down the
gradient, and 0 = a_0 < a_1 < ... < a_n numbers, a_n >= max <u, G> on the ball. The G of the ball with
a_k <= <u, G> <= a_k+1 are within

    rho_k = (e^2 - a_k^2)^(1/2)    of the center    x_k = x + a_k u,

and those with <u, G> <= a_1 within e of x. That is all that is known of them, so the balls around the centers are L2
balls in Linf, too. A stage around x_k bounds the fall of the margin without its slope s_k along u, and within the slab
the slope adds at most s_k (a_k+1 - a_k). The a_k may be chosen freely: as far as the slab before allows. Proof:
docs/proofs.md#slabs.

Letters: B images, I those that are open.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from certify.adjoint.adjoint import AdjointAnalysis
from certify.image.radius_stage import RadiusStage
from certify.image.situation import Situation, slope
from certify.shared.certificate import SLACK, of_class
from zoo.arithmetic import OUT, U, broadcast_batch, nan_to_inf, product

MOST = 8  # slabs of one ball
SHARE = 0.9  # of what a slab leaves of the margin that its width may use up


@dataclass(frozen=True)
class Balls:
    """The balls of radius e around some images, in each of which the margin over one class is asked for.

    u (B, *x) points down its gradient, `end_B` is the largest <u, G>, and `off_B` bounds what rounding does to centers,
    to u, and to gradients without their part along it, relative to the slope.
    """

    x: Tensor
    u: Tensor
    label_B: Tensor
    class_B: Tensor
    e_B: Tensor
    end_B: Tensor
    off_B: Tensor

    @staticmethod
    def of(here: Situation, class_B: Tensor, e_B: Tensor, g: Tensor) -> "Balls":
        u, x_B = _unit(-g), torch.linalg.vector_norm(here.images.flatten(1), dim=1)
        end_B, off_B = product(here.ball.length(u), e_B) * OUT, 16 * U * g[0].numel() * (x_B + e_B)
        return Balls(here.images, u, here.clean.label_B, class_B, e_B, end_B, off_B)

    def __getitem__(self, index_I: Tensor) -> "Balls":
        return Balls(*(part[index_I] for part in vars(self).values()))


@dataclass(frozen=True)
class Center:
    """The center of a slab: a margin there, its slope along u, and the bound of its fall without it, (B,) each."""

    margin_B: Tensor
    slope_B: Tensor
    rest_B: Tensor
    failure_B: Tensor

    def spare(self, balls: Balls) -> Tensor:
        """Return what is left of the margin for the slope."""
        slack_B = SLACK * (1 + self.margin_B.abs() + self.rest_B)
        return self.margin_B - nan_to_inf(self.rest_B + product(self.slope_B, balls.off_B) + slack_B)

    def width(self, spare_B: Tensor, to_end_B: Tensor) -> Tensor:
        """Return the width of the slab, 0 where nothing is left."""
        return torch.minimum(SHARE * spare_B / self.slope_B, to_end_B).nan_to_num(0.0).clamp_min(0)


@dataclass(frozen=True)
class Slabs:
    """Bounds slab by slab, from adjoint terms of L2 balls around any points, by their labels, and a stage of these."""

    around: Callable[[Tensor, Tensor], AdjointAnalysis]
    stage: Callable[[Situation, Tensor], RadiusStage]
    seed: bytes

    def losses(self, here: Situation, class_B: Tensor, e_B: Tensor, rest_B: Tensor) -> tuple[Tensor, Tensor]:
        """Bound how far the margins over these classes fall within e, infinite where this proves nothing: (B,).

        `rest_B` is the bound of what is not their first order. Also return the probability that a bound is wrong.
        """
        g, margin_B = here.gradients(class_B[None]).image[0], of_class(here.clean.margin_BJ, class_B)
        balls, index_I = Balls.of(here, class_B, e_B, g), torch.arange(len(e_B), device=e_B.device)
        center = Center(margin_B, slope(g, balls.u), rest_B, torch.zeros_like(e_B))
        a_B, failure_B, proved_B = torch.zeros_like(e_B), torch.zeros_like(e_B), torch.zeros_like(here.clean.correct_B)
        least_B = margin_B.clone()  # on the slabs so far
        for slabs_left in range(MOST, 0, -1):
            some = balls[index_I]
            spare_I, to_end_I = center.spare(some), some.end_B - a_B[index_I]
            width_I = center.width(spare_I, to_end_I)
            least_B[index_I] = torch.minimum(least_B[index_I], spare_I - product(center.slope_B, width_I))
            failure_B[index_I] += center.failure_B
            proved_B[index_I] = (spare_I > 0) & (width_I == to_end_I)
            a_B[index_I] += width_I
            near_I = width_I * slabs_left > to_end_I  # else the slabs that are left would hardly reach the end
            index_I = index_I[near_I & (width_I < to_end_I)]
            if not len(index_I) or slabs_left == 1:
                break
            center = self._center(balls[index_I], a_B[index_I])
        return torch.where(proved_B, margin_B - least_B, torch.inf), failure_B

    def _center(self, balls: Balls, a_B: Tensor) -> Center:
        """Return the centers x + a u, with the bounds of the stages around them."""
        inner = self.around(balls.x + broadcast_batch(a_B, balls.x.shape[1:]) * balls.u, balls.label_B)
        here = Situation.of(inner, inner.chain.points[0], torch.arange(len(a_B), device=a_B.device), self.seed)
        margin_B = of_class(inner.clean.margin_BJ, balls.class_B)
        slope_B = slope(here.gradients(balls.class_B[None]).image[0], balls.u)
        radius_B = ((balls.e_B - a_B).clamp_min(0) * (balls.e_B + a_B)).sqrt() * OUT + balls.off_B
        needed_B = margin_B - product(slope_B, balls.end_B - a_B)  # what the last slab has to leave
        stage = self.stage(_alone(here, balls.class_B, needed_B, balls.u), radius_B)
        loss_BJ = stage.losses(radius_B, torch.full_like(here.clean.margin_BJ, torch.inf))
        return Center(margin_B, slope_B, of_class(loss_BJ, balls.class_B), stage.failure_B + inner.failure)


def _alone(here: Situation, class_B: Tensor, margin_B: Tensor, along_BCHW: Tensor) -> Situation:
    """Return the situation with one rival of every image, whose margin does not fall along these vectors."""
    margin_BJ = torch.full_like(here.clean.margin_BJ, torch.inf).scatter(1, class_B[:, None], margin_B[:, None])
    clean = replace(here.clean, margin_BJ=margin_BJ)
    return replace(here, clean=clean, rivals_BR=class_B[:, None], along=along_BCHW)


def _unit(g: Tensor) -> Tensor:
    """Return vectors (B, *x) of these directions that are no longer than 1, whatever the rounding."""
    length_B = torch.linalg.vector_norm(g.flatten(1), dim=1) * (1 + 4 * U * g[0].numel())
    return g / broadcast_batch(length_B.clamp_min(1e-300), g.shape[1:])
