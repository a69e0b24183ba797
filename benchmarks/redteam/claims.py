"""A method's claim about one image, and the largest drop of the same margin that ascent finds.

Letters: B images, J classes; y the label, m_j = logit_y - logit_j.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from certify.api import certifier, radius_of
from certify.shared.bake import bake
from certify.shared.ball import LINF
from certify.shared.certificate import Analysis
from certizoo import UserError
from tests.tools.ascent import ascend, ascend_box, rival_loss
from tests.tools.trials import inside

METHODS = ("lofast", "lofast_local", "adjoint", "image", "taylor")  # `best` takes its claims from these
STEPS, STARTS = 20, 8
SLACK = 1e-9  # for rounding in the drop, relative to the logits


@dataclass(frozen=True)
class Claim:
    """The claim that within a ball of eps the margin over class `rival` falls by at most `loss`: (B,) each."""

    eps_B: Tensor
    rival_B: Tensor
    loss_B: Tensor


def analysis_of(model: Any, x: Tensor, method: str, norm: str, nonce: str = "n") -> Analysis | None:
    """Return the analysis of the model's own answers; None for a refused model, for which nothing is claimed."""
    with torch.no_grad():
        y = model(x.to(next(model.parameters()).dtype)).argmax(-1)
    try:
        return certifier(model, method, nonce, norm).analyse(x, y)
    except UserError:
        return None


def claim_at(analysis: Analysis, eps_B: Tensor) -> Claim:
    """Return the claim about the class whose margin the certificate states."""
    answer = analysis.at(eps_B)
    rival_B = (analysis.clean.margin_BJ - answer.margin_B[:, None]).abs().argmin(-1)
    return Claim(eps_B, rival_B, answer.loss_B)


def certified_claim(analysis: Analysis) -> Claim:
    """Return the claim at the certified radius; nothing is claimed for images without one (eps 0)."""
    return claim_at(analysis, radius_of(analysis))


def margin(model: Any, label_B: Tensor, rival_B: Tensor) -> Callable[[Tensor], Tensor]:
    """Return m_rival as a function of a batch that repeats the images."""
    loss = rival_loss(model, label_B, rival_B)
    return lambda z: -loss(z)


def drop(model: Any, x: Tensor, label_B: Tensor, claim: Claim, norm: str, starts: int = STARTS) -> Tensor:
    """Return the largest fall of the margin found in the ball (float64 function), minus rounding: (B,)."""
    baked, x = bake(model), x.double()
    of = margin(baked, label_B, claim.rival_B)
    within_B = inside(x, claim.eps_B, norm, torch.float64)
    if norm == LINF:
        lowest_B = -ascend_box(lambda z: -of(z), x, within_B, STEPS, starts // 2)
    else:
        lowest_B = -ascend(lambda z: -of(z), x, within_B, STEPS, starts)
    with torch.no_grad():
        return of(x) - lowest_B - SLACK * (1 + baked(x).abs().amax(-1))


def ratio(model: Any, x: Tensor, analysis: Analysis, claim: Claim, norm: str) -> float:
    """Return the largest drop / loss of the images with a certified radius; 0 if there is none."""
    dropped_B = drop(model, x, analysis.clean.label_B, claim, norm)
    wanted_B = (claim.eps_B > 0) & claim.loss_B.isfinite()
    share_B = dropped_B.clamp_min(0) / claim.loss_B.clamp_min(1e-300)
    return float(share_B[wanted_B].amax()) if bool(wanted_B.any()) else 0.0
