"""Analyses and radius stages of method `image` on small models, and their maps as dense matrices."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from certify.ellipsoids.columns import Columns
from certify.ellipsoids.ellipsoid import Ellipsoids
from certify.ellipsoids.joint import Joint
from certify.image.image import Image, ImageAnalysis
from certify.image.radius_stage import RadiusStage
from certify.image.situation import Situation
from tests.tools.ascent import ascend, ascend_box, rival_loss
from tests.tools.small_models import labelled, small_model
from zoo.bounds.contracts import Expansion, QuadraticForm
from zoo.bounds.tape import Vectors

SMOOTH = ("standard", "smooth", "cls")  # parts whose hidden units have forms


def analysis_of(parts: str, seed: int = 0, count: int = 3, norm: str = "l2") -> tuple[Image, ImageAnalysis]:
    return analysed(small_model(parts, seed), count, norm)


def analysed(model: Any, count: int, norm: str) -> tuple[Image, ImageAnalysis]:
    certifier = Image(model, nonce="a nonce", norm=norm)
    ((_, found),) = certifier.analyse(*labelled(model, count, 1)).parts
    assert isinstance(found, ImageAnalysis)
    return certifier, found


def situation(analysis: ImageAnalysis) -> Situation:
    return Situation.of(analysis.inner, analysis.images, torch.arange(len(analysis.images)), b"a seed")


def off_by(analysis: ImageAnalysis, off: float) -> Situation:
    """Return the situation with node ends off by `off`, which the adjoint analysis and its radii do not know."""
    return replace(situation(analysis), off=lambda _, r_B: torch.full_like(r_B, off), radii=lambda _: [])


def stage_of(analysis: ImageAnalysis, e: float) -> RadiusStage:
    here = situation(analysis)
    return RadiusStage(here, torch.full_like(here.images[:, 0, 0, 0], e), Columns.of(here.tape, here.images))


def beaten(
    certifier: Image,
    analysis: ImageAnalysis,
    stage: RadiusStage,
    radii: tuple[float, ...],
    bounds: Callable[[RadiusStage, Tensor], Tensor] | None = None,
) -> bool:
    """Check if an image of one of the balls inside these L2 balls loses more margin than the stage claims.

    `bounds` returns the losses of all rivals, `formed_losses` by default.
    """
    for e in radii:
        e_B = stage.most_B / stage.most_B * e
        loss_BJ = stage.losses(e_B, torch.full_like(analysis.clean.margin_BJ, torch.inf))
        bounds_BJ = (bounds or formed_losses)(stage, e_B)
        for step in (1, 2, 3):
            rival_B = (analysis.clean.label_B + step) % 4
            found_B = fallen(certifier, analysis, rival_B, e_B)
            assert (found_B > 0).all()
            for bound_BJ in (loss_BJ, bounds_BJ):
                if bool((found_B > bound_BJ.gather(1, rival_B[:, None])[:, 0] * (1 + 1e-9)).any()):
                    return True
    return False


def fallen(certifier: Image, analysis: ImageAnalysis, rival_B: Tensor, e_B: Tensor) -> Tensor:
    """Return the largest fall of the margins over these rivals that ascent finds within these L2 balls."""
    ball, loss = analysis.ball, rival_loss(certifier.baked, analysis.clean.label_B, rival_B)
    search = ascend if ball.norm == "l2" else ascend_box
    return search(loss, analysis.images, ball.eps_within(e_B), 60, 4) - loss(analysis.images)


def formed_losses(stage: RadiusStage, e_B: Tensor) -> Tensor:
    """Return the losses by the forms of every rival, also of those that a decision does not need."""
    class_CB = stage.here.rivals_BR.mT
    formed, asked = stage._formed_of(class_CB), stage._asked(e_B)
    loss_BJ = torch.full_like(stage.here.clean.margin_BJ, torch.inf)
    stage._lower(loss_BJ, formed, torch.zeros_like(e_B, dtype=torch.bool), asked)
    beside_CB = stage._rounded(formed, class_CB, asked) + stage.ellipsoids.beside_forms(formed.margins, asked.grown)
    stage._lowered(loss_BJ, formed, formed.coupled.cost(e_B, asked.grown) + beside_CB)
    return loss_BJ


def dense(joint: Joint, last: int) -> Vectors:
    """Return M_i (B, x, n) of every leaf up to the last one, by pushing every unit vector.

    Columns are those of u for the last leaf, in which sources of later leaves stand before the noise.
    """
    found = Vectors()
    eye = torch.eye(joint.room(last), dtype=torch.float64)[:, None].expand(-1, len(joint.most_B), -1)
    joint.push(eye, partial(look, found), last)
    return found


def look(seen: Vectors, at: int, v: Tensor) -> None:
    """Return the columns of a matrix, given its action on unit vectors."""
    seen[at] = v.flatten(2).permute(1, 2, 0)


def matrix(ellipsoids: Ellipsoids, form: QuadraticForm, at: int, maps: Vectors) -> Tensor:
    """Return M^T C M (C, B, n, n) of a leaf."""
    m = maps[at]
    columns = m.permute(2, 0, 1).unflatten(-1, entering(ellipsoids.tape.leaves[at])[1:])
    pulled = torch.stack([form.apply(column.expand(len(form.largest), *column.shape)) for column in columns])
    return torch.einsum("ncbx,bxk->cbnk", pulled.flatten(3), m)  # pulled: (n, C, B, *x)


def entering(leaf: Expansion) -> torch.Size:
    """Return the shape of a module's input."""
    return leaf.pull(leaf.y[None])[0].shape
