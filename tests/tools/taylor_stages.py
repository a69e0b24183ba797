"""Analyses and radius stages of method `taylor` on small models."""

from functools import partial

import torch
from torch import Tensor, nn

from certify.api import certifier
from certify.ellipsoids.columns import Columns
from certify.image.radius_stage import RadiusStage
from certify.taylor.taylor import Taylor, TaylorAnalysis, TaylorStage, has_units
from tests.tools.ascent import ascend, rival_loss
from tests.tools.image_stages import formed_losses, off_by, situation
from tests.tools.small_models import labelled, small_model


def taylor_of(parts: str, count: int = 3, norm: str = "l2", seed: int = 0) -> tuple[Taylor, TaylorAnalysis]:
    model = small_model(parts, seed)
    found = Taylor(model, nonce="a nonce", norm=norm)
    ((_, analysis),) = found.analyse(*labelled(model, count, 1)).parts
    assert isinstance(analysis, TaylorAnalysis)
    return found, analysis


def stage_of(analysis: TaylorAnalysis, e: float, off: float = 0.0) -> TaylorStage:
    here = off_by(analysis, off) if off else situation(analysis)
    e_B = torch.full_like(here.images[:, 0, 0, 0], e)
    return TaylorStage(here, e_B, Columns.of(here.tape, here.images))


def analysed(net: nn.Module, x: Tensor, y: Tensor) -> TaylorAnalysis:
    ((_, analysis),) = certifier(net, "taylor", "n", "l2", (x, y)).analyse(x, y).parts  # type: ignore[attr-defined]
    assert isinstance(analysis, TaylorAnalysis)
    return analysis


def exact_losses(stage: RadiusStage, e_B: Tensor) -> Tensor:
    """Return the losses by exact second orders of every rival; by forms for a model without them."""
    if not isinstance(stage, TaylorStage) or not has_units(stage.here.tape):
        return formed_losses(stage, e_B)
    loss_BJ, asked = torch.full_like(stage.here.clean.margin_BJ, torch.inf), stage._asked(e_B)
    for class_B in stage.here.rivals_BR.mT:
        both = [
            bound(class_B, torch.ones_like(class_B, dtype=torch.bool), partial(stage.together, asked=asked))
            for bound in (stage._rivals.in_common, stage._rivals.alone)
        ]
        loss_BJ.scatter_(1, class_B[:, None], torch.stack(both).amin(0)[:, None])
    return loss_BJ


def fall(net: nn.Module, x: Tensor, y: Tensor, rival_B: Tensor, e_B: Tensor) -> Tensor:
    """Return the largest fall of the margin over these rivals that ascent finds."""
    loss = rival_loss(net, y, rival_B)
    return ascend(loss, x, e_B, 80, 8) - loss(x)
