"""The parts of the attack loop that depend on the norm: random start, steepest ascent, projection on the ball.

Legend: delta_BCHW perturbation, grad_BCHW gradient of the attack's loss for the image, eps radius in [0,1] pixels.
"""

from collections.abc import Callable
from typing import Annotated, Protocol

import torch
from torch import Tensor

from certizoo import norms
from certizoo.config.schema import OneOf

Draw = Callable[[Callable[..., Tensor]], Tensor]
TINY = 1e-30  # below any useful gradient, above float32's smallest number


def _norm_B111(x_BCHW: Tensor) -> Tensor:
    return x_BCHW.flatten(1).norm(dim=1).view(-1, 1, 1, 1)


class Norm(Protocol):
    """A norm p: its ball of radius eps around 0 and the direction in which a linear function rises fastest."""

    def random(self, draw: Draw, eps: float) -> Tensor:
        """Return a uniform point of the ball, from draw(torch.rand)_BCHW or draw(torch.randn)_BCHW or both."""

    def ascent(self, grad_BCHW: Tensor) -> Tensor:
        """Return argmax of <v, grad> over ||v||_p <= 1; zero if the gradient is zero."""

    def project(self, delta_BCHW: Tensor, eps: float) -> Tensor:
        """Return the nearest point of the ball."""


class Linf:
    """||delta||_inf = max_i |delta_i|."""

    def random(self, draw: Draw, eps: float) -> Tensor:
        return (2 * draw(torch.rand) - 1) * eps

    def ascent(self, grad_BCHW: Tensor) -> Tensor:
        return grad_BCHW.sign()

    def project(self, delta_BCHW: Tensor, eps: float) -> Tensor:
        return delta_BCHW.clamp(-eps, eps)


class L2:
    """||delta||_2 = sqrt(sum_i delta_i^2), over all channels and pixels of one image."""

    def random(self, draw: Draw, eps: float) -> Tensor:
        """Return direction g/||g|| times radius eps u^(1/d): volume grows as r^d."""
        uniform_BCHW, gaussian_BCHW = draw(torch.rand), draw(torch.randn)
        dim = gaussian_BCHW[0].numel()
        radius_B111 = eps * uniform_BCHW[:, :1, :1, :1] ** (1.0 / dim)
        return gaussian_BCHW / _norm_B111(gaussian_BCHW).clamp_min(TINY) * radius_B111

    def ascent(self, grad_BCHW: Tensor) -> Tensor:
        # Divide by the largest entry first: the squares of a saturated gradient (1e-25) would underflow to zero.
        largest_B111 = grad_BCHW.flatten(1).abs().amax(dim=1).view(-1, 1, 1, 1).clamp_min(TINY)
        scaled_BCHW = grad_BCHW / largest_B111
        return scaled_BCHW / _norm_B111(scaled_BCHW).clamp_min(TINY)

    def project(self, delta_BCHW: Tensor, eps: float) -> Tensor:
        return delta_BCHW * (eps / _norm_B111(delta_BCHW).clamp_min(TINY)).clamp_max(1.0)


NORMS: dict[str, Norm] = {norms.LINF: Linf(), norms.L2: L2()}
NormName = Annotated[str, OneOf(*NORMS)]


def distance(adversarial_BCHW: Tensor, images_BCHW: Tensor, norm: str) -> Tensor:
    """Return distance_B between two batches in the norm, in float64."""
    order = {norms.LINF: torch.inf, norms.L2: 2.0}[norm]
    return (adversarial_BCHW.double() - images_BCHW.double()).flatten(1).norm(p=order, dim=1)
