"""The adjoint certificate with its remainders measured on the ball of images, not on a ball at every module.

Of module i let H_i be the change of its input and g_i the gradient of a margin at its output. Modules that have
quadratic forms (`Forms`), such as hidden units, bound -<g_i, R_i> by <H_i, C_i H_i> / 2. With H_i = M_i u, and |u|^2 <=
Theta for an image that moves by no more than eps (ellipsoid.py),

    the margin falls by at most  |g_0| eps + lambda_max( sum_i M_i^T C_i M_i ) Theta / 2

plus what modules without a form cost at |H_i|. The worst direction of a form is seldom one that images reach: this is
often a tenth of ||C_i|| |H_i|^2. The lesser of this and of the adjoint certificate counts. Proof:
docs/proofs.md#image-forms.

The maps are made for one largest eps, and hold below. Beyond min_j m_j / |g_0| nothing can be certified, which is the
first of an image's *rungs*; each of the next ones is closer to the radius that was found so far.

Letters: B images, J classes, C rivals of each, I some of the images.
"""

from functools import cached_property

import torch
from torch import Tensor

from certify.methods.adjoint import Adjoint, AdjointAnalysis
from certify.methods.certificate import Breakdown, Certificate, Clean, binding_class, decide_by, gaps, per_image
from certify.methods.rung import Rung, Situation
from certify.methods.weights import Look

RUNGS = 8
MOST = 2.0**10
LOOKS = 4
BEYOND = 1.1
FEW_RIVALS = 64  # whose gradients say where to begin


class ImageAnalysis:
    """Of a batch of correct images: every eps is answered by the adjoint analysis first, and what that leaves open by
    forms on the ball of images."""

    def __init__(self, inner: AdjointAnalysis, images_BCHW: Tensor, seed: bytes) -> None:
        self.inner, self.images, self._seed = inner, images_BCHW, seed
        self._rungs: list[list[tuple[Tensor, Rung]]] = [[] for _ in range(RUNGS)]

    @property
    def clean(self) -> Clean:
        return self.inner.clean

    @property
    def failure(self) -> float:
        failure_B = torch.zeros_like(self.clean.margin_BJ[:, 0])
        for level in self._rungs:
            for index_I, rung in level:
                failure_B[index_I] += rung.failure
        return self.inner.failure + float(failure_B.max())

    def at(self, eps: float | Tensor) -> Certificate:
        eps_B = per_image(eps, self.clean)
        loss_BJ, class_B = self.inner.losses(self.inner.radii(eps_B))
        loss_BJ, class_B = self._sharper(eps_B, loss_BJ, class_B)
        return decide_by(self.clean, loss_BJ, eps_B, class_B)

    def breakdown(self, eps: float | Tensor) -> Breakdown:
        """That of the adjoint analysis."""
        return self.inner.breakdown(eps)

    @torch.no_grad()
    def _sharper(self, eps_B: Tensor, loss_BJ: Tensor, class_B: Tensor) -> tuple[Tensor, Tensor]:
        """The losses again: one rung after the other, as long as an image is open."""
        open_B, most_B = self._open(loss_BJ) & (eps_B > 0), self._first_most
        was_open_B = open_B
        for level in range(RUNGS):
            open_B = open_B & (eps_B < most_B)  # not a number: there is no rung
            if not bool(open_B.any()):
                break
            self._build(level, open_B, most_B)
            next_B = torch.full_like(most_B, torch.nan)
            for index_I, rung in self._rungs[level]:
                next_B[index_I] = rung.next_most
                asked_I = open_B[index_I]
                if bool(asked_I.any()):
                    found_IJ = rung.losses(torch.where(asked_I, eps_B[index_I], 0.0), loss_BJ[index_I])
                    loss_BJ[index_I] = torch.where(asked_I[:, None], found_IJ, loss_BJ[index_I])
            open_B, most_B = self._open(loss_BJ), next_B
        won_B = was_open_B & ~self._open(loss_BJ)
        return loss_BJ, torch.where(won_B, binding_class(self.clean, loss_BJ), class_B)

    def _open(self, loss_BJ: Tensor) -> Tensor:
        return (~(gaps(self.clean.margin_BJ, loss_BJ) > 0) & torch.isfinite(self.clean.margin_BJ)).any(-1)

    @cached_property
    def _first_most(self) -> Tensor:
        """Where an image is likely to be lost: before min_j m_j / |g_0|, as remainders take their part."""
        here = Situation.of(self.inner, self.images, torch.arange(len(self.images)), self._seed)
        class_CB = self.inner.rivals_BR[:, :FEW_RIVALS].mT
        g_0, _ = here.gradients(class_CB)
        first_CB, margin_CB = g_0.flatten(2).norm(dim=-1), self.clean.margin_BJ.gather(1, class_CB.mT).mT
        share_B, rank_B = (margin_CB / first_CB).nan_to_num(torch.inf).min(0)
        first_B, margin_B, class_B = (t.gather(0, rank_B[None])[0] for t in (first_CB, margin_CB, class_CB))
        _, g = here.gradients(class_B[None])
        most_B = share_B.clamp_max(MOST)
        for _ in range(LOOKS):
            most_B = (most_B * Look(here.tape, self.images, most_B, g, here.draw).radius(first_B, margin_B)).sqrt()
        return BEYOND * most_B

    def _build(self, level: int, open_B: Tensor, most_B: Tensor) -> None:
        """The rungs that open images lack at this level."""
        for index_I, _ in self._rungs[level]:
            open_B = open_B.clone()
            open_B[index_I] = False
        index_I = open_B.nonzero().flatten()
        if len(index_I):
            rung = Rung(Situation.of(self.inner, self.images, index_I, self._seed), most_B[index_I])
            self._rungs[level].append((index_I, rung))


class Image(Adjoint):
    """The certifier of one model, as `Adjoint` is. Raises NoRule likewise."""

    def expand(self, images_BCHW: Tensor, clean: Clean) -> ImageAnalysis:  # type: ignore[override]
        return ImageAnalysis(super().expand(images_BCHW, clean), images_BCHW, self._seed)
