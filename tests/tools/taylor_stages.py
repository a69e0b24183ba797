"""Analyses and radius stages of method `taylor` on small models."""

import torch
from torch import Tensor, nn

from certify.api import certifier
from certify.image.columns import Columns
from certify.taylor.taylor import Taylor, TaylorAnalysis, TaylorStage
from tests.tools.image_stages import off_by, situation
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
