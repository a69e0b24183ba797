"""The two questions about a model and some images: is it certified at eps, and up to which eps is it certified?"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from certify.graph.model import with_rules
from certify.methods import AUTO, NAMES, chosen
from certify.shared.bake import Model
from certify.shared.ball import L2, known
from certify.shared.certificate import Analysis, Certificate, Certifier, guess_of, in_search
from certizoo import UserError
from certizoo.inputs import batch_given, require_numbers, require_radius
from certizoo.nearest import unknown
from certizoo.text import shown

MAX_EPS = 2.0**10  # far above the diameter of any image's box, in either norm
TOLERANCE = 2.0**-9  # relative precision of a radius
WIDE = 1.2  # high / low from which on a bracket may be halved
STRIDE = 1.5  # smallest factor of a step upwards
MAX_TRIALS = 60  # a radius below 8^-20 of the first guess counts as 0
P = ParamSpec("P")
R = TypeVar("R")


def outside_inference_mode(call: Callable[P, R]) -> Callable[P, R]:
    """Wrap the call so that torch records operations in it, as Jacobians are computed from the record."""

    @wraps(call)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False):
            return call(*args, **kwargs)

    return outside


@outside_inference_mode
def certifier(
    model: nn.Module,
    method: str,
    nonce: str | None = None,
    norm: str = L2,
    batch: tuple[Tensor, Tensor] | None = None,
) -> Certifier:
    """Return the certifier of a method for balls in a norm, "l2" or "linf".

    A model whose class has no rules is captured (certify/graph) for images like those of `batch`, images and labels.

    The method is one of METHODS or "auto" (certify/methods/__init__.py). `nonce` chooses the random starts of a method
    that has any, so that a result can be reproduced; None draws a new one. A failure probability holds against anyone
    who fixed the weights and images before the nonce was drawn.

    Raises UserError for an unknown method or norm, and NoRule for an uncertifiable model.
    """
    return named_certifier(model, method, nonce, norm, batch)[1]


def captured(model: nn.Module, shape_CHW: tuple[int, int, int]) -> nn.Module | Model:
    """Return the model, captured for images of this shape if its class has no rules. Errors as `certifier`."""
    gray_BCHW = torch.full((1, *shape_CHW), 0.5)
    return with_rules(model, gray_BCHW, torch.zeros(1, dtype=torch.int64))


def named_certifier(
    model: nn.Module, method: str, nonce: str | None, norm: str, batch: tuple[Tensor, Tensor] | None
) -> tuple[str, Certifier]:
    """Return the certifier of `certifier`, and its name in METHODS."""
    if not isinstance(method, str) or method not in NAMES:
        raise unknown("certification method", method, NAMES)
    if nonce is not None and (not isinstance(nonce, str) or not nonce or not nonce.isprintable()):
        raise UserError(f"nonce={shown(nonce)} is not a string; pass one such as 'n1f3', or None to draw one")
    norm, given, shape = known(norm), cast(nn.Module | Model, model), None
    if batch is not None:
        images, labels = batch_given(*batch)
        given, shape = with_rules(model, images, labels), tuple(images.shape[1:])
    return chosen(method, given, nonce, norm, shape)


@outside_inference_mode
def certify(
    model: nn.Module,
    images_BCHW: Tensor,
    labels_B: Tensor,
    eps: float | Tensor,
    method: str = AUTO,
    nonce: str | None = None,
    norm: str = L2,
) -> Certificate:
    """Return certificates at one radius `eps` in [0,1] pixel space, or at one per image, (B,).

    The whole ball is covered, including the part outside the [0,1] box. Proof: docs/proofs.md#threat-model.

    Args:
        model: any module that maps images to logits and has rules for all its parts.
        images_BCHW: (B, C, H, W) in [0,1], float32 or float64.
        labels_B: (B,), of any integer type.
        eps: one radius, or one per image.
        method: "auto", or "lofast", "lofast_local", "adjoint", "image", "taylor", "linear", "crown", "best". "auto" is
            "best" for a small model of the zoo, "adjoint" for others up to 2^29 products a forward pass, else "lofast".
        nonce: a text that chooses the random starts of norms, so that a result can be reproduced. None draws one.
        norm: of the ball, "l2" or "linf".

    Returns:
        (B,) tensors margin_B, loss_B, certified_B, correct_B, unknown_B.

    Raises:
        UserError: for invalid input, and for a model that computes something else than its code and its weights say.
        NoRule: a UserError, for a module about which nothing is proved.
    """
    radius = radius_given(eps, labels_B.numel() if isinstance(labels_B, Tensor) else 1, known(norm))
    return certifier(model, method, nonce, norm, (images_BCHW, labels_B)).analyse(images_BCHW, labels_B).at(radius)


@outside_inference_mode
def certified_radius(
    model: nn.Module,
    images_BCHW: Tensor,
    labels_B: Tensor,
    method: str = AUTO,
    nonce: str | None = None,
    norm: str = L2,
) -> Tensor:
    """Return the largest eps that a search proves for each image, rounded down: (B,) float64, 0 where misclassified.

    Arguments and errors are those of `certify`, which spends more on its one radius and may prove a larger one.
    """
    return radius_of(certifier(model, method, nonce, norm, (images_BCHW, labels_B)).analyse(images_BCHW, labels_B))


@outside_inference_mode
def radius_of(analysis: Analysis) -> Tensor:
    """Return the radii of `certified_radius` from stored terms, without a new forward pass.

    Every returned radius was tested itself, so the result is sound for any bound; it is the largest one because bounds
    are nondecreasing in eps. The search solves loss / margin = 1. Between two eps that ratio grows nearly like a power,
    so the next eps is where the power through the ends of the bracket reaches 1; with one end only, the power is 1.
    Ratios of certified images may be too large (cheap bounds come first), and guesses therefore too small. So a step
    grows by at least a half with one end, and every other step halves a bracket that is still wide or does not close.

    Proof: docs/proofs.md#certified-radius.
    """
    sure_B = analysis.at(0.0).certified_B  # no radius is searched where rounding alone may change the class
    low_B = torch.zeros(len(sure_B), dtype=torch.float64, device=sure_B.device)
    low, high = End(low_B, low_B), End(torch.full_like(low_B, torch.inf), torch.full_like(low_B, torch.inf))
    eps_B = guess_of(analysis)
    for step in range(MAX_TRIALS):
        open_B = sure_B & (high.eps_B > low.eps_B * (1 + TOLERANCE)) & (low.eps_B < MAX_EPS)
        if not bool(open_B.any()):
            break
        answer = in_search(analysis, torch.where(open_B, eps_B, 0.0))  # eps = 0 costs nothing
        tried = End(eps_B, answer.loss_B / answer.margin_B)
        low = tried.where(open_B & answer.certified_B, low)
        high = tried.where(open_B & ~answer.certified_B, high)
        eps_B = _next(low, high, wide=math.inf if step % 2 == 0 else WIDE if step < 8 else 1.0)
    return torch.where(sure_B, low.eps_B, 0.0)


def radius_given(eps: object, count: int, norm: str) -> float | Tensor:
    """Return eps, one or one per image, as a number or tensor of radii in the norm. Raises UserError if invalid."""
    if isinstance(eps, bool) or not isinstance(eps, int | float | np.integer | np.floating | Tensor):
        raise UserError(f"eps={shown(eps)} is not a number; pass a radius in [0,1] pixel space, such as 0.1")
    if isinstance(eps, Tensor):
        return _radii_given(eps, count, norm)
    try:
        radius = float(eps)
    except OverflowError:
        radius = math.inf
    if not 0 <= radius < math.inf:
        raise UserError(f"eps={shown(eps)} must be finite and at least 0")
    require_radius("eps", radius, norm)
    return radius


def _radii_given(eps: Tensor, count: int, norm: str) -> float | Tensor:
    require_numbers("eps", eps)
    if eps.is_complex() or eps.dtype is torch.bool or eps.shape not in ((), (count,)):
        raise UserError(f"eps={shown(eps)} must be one number, or one for each of the {count} images")
    given = eps.detach().double()
    if not bool((torch.isfinite(given) & (given >= 0)).all()):
        raise UserError(f"eps={shown(eps)} must be finite and at least 0")
    require_radius("eps", max(given.flatten().tolist(), default=0.0), norm)
    return float(given) if given.ndim == 0 else given


@dataclass(frozen=True)
class End:
    """One end of a bracket: eps, and loss / margin there."""

    eps_B: Tensor
    share_B: Tensor

    def where(self, chosen_B: Tensor, other: "End") -> "End":
        """Return this end for the chosen images, the other one for the rest."""
        return End(torch.where(chosen_B, self.eps_B, other.eps_B), torch.where(chosen_B, self.share_B, other.share_B))


def _next(low: End, high: End, wide: float) -> Tensor:
    """Return the eps to try, inside the bracket.

    A guess close to an end is moved half the tolerance beyond the root, so that the bracket closes. A bracket with high
    > wide low is halved.
    """
    one_sided_B = torch.isinf(high.eps_B) | (low.eps_B == 0)
    end = low.where(low.eps_B > 0, high)
    power_B = (high.share_B / low.share_B).log() / (high.eps_B / low.eps_B).log()
    power_B = torch.where(one_sided_B | ~(power_B >= 1), 1.0, power_B)
    guess_B = end.eps_B * (-end.share_B.log() / power_B).exp()
    guess_B = torch.where(torch.isinf(high.eps_B), torch.fmax(guess_B, STRIDE * low.eps_B), guess_B)
    guess_B = torch.where(guess_B < low.eps_B * (1 + TOLERANCE / 2), low.eps_B * (1 + TOLERANCE * 3 / 4), guess_B)
    guess_B = torch.where(guess_B > high.eps_B * (1 - TOLERANCE / 2), high.eps_B * (1 - TOLERANCE * 3 / 4), guess_B)
    middle_B = torch.where(
        torch.isinf(high.eps_B),
        8 * low.eps_B,
        torch.where(low.eps_B > 0, (low.eps_B * high.eps_B).sqrt(), high.eps_B / 8),
    )
    inside_B = (guess_B > low.eps_B) & (guess_B < high.eps_B) & (guess_B < 64 * end.eps_B)
    halve_B = ~one_sided_B & (high.eps_B > wide * low.eps_B)
    return torch.where(inside_B & ~halve_B, guess_B, middle_B)
