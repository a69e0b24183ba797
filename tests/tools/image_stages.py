"""Analyses and radius stages of method `image` on small models, and their maps as dense matrices."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from certify.image.columns import Columns
from certify.image.ellipsoid import Ellipsoids
from certify.image.image import Image, ImageAnalysis
from certify.image.joint import Joint
from certify.image.radius_stage import RadiusStage, Situation
from tests.tools.small_models import labelled, small_model
from zoo.bounds.contracts import Expansion, QuadraticForm
from zoo.bounds.tape import Vectors

SMOOTH = ("standard", "smooth", "cls")  # parts whose hidden units have forms


def analysis_of(parts: str, seed: int = 0, count: int = 3, norm: str = "l2") -> tuple[Image, ImageAnalysis]:
    model = small_model(parts, seed)
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


def dense(joint: Joint, last: int) -> Vectors:
    """Return M_i (B, x, n) of every leaf up to the last one, by pushing every unit vector."""
    room, found = joint.room(last), Vectors()
    eye = torch.eye(room, dtype=torch.float64)[:, None].expand(-1, len(joint.most_B), -1)
    joint.push(eye, partial(look, found), last)
    n = {at: joint.room(at) for at in found}
    return {at: m[..., : n[at]] for at, m in found.items()}


def look(seen: Vectors, at: int, v: Tensor) -> None:
    """Return the columns of a matrix, given its action on unit vectors."""
    seen[at] = v.flatten(2).permute(1, 2, 0)


def matrix(ellipsoids: Ellipsoids, form: QuadraticForm, at: int, maps: Vectors) -> Tensor:
    """Return M^T C M (C, B, n, n) of a leaf, padded with zeros to the size of the last one."""
    m = maps[at]
    columns = m.permute(2, 0, 1).unflatten(-1, entering(ellipsoids.tape.leaves[at])[1:])
    pulled = torch.stack([form.apply(column.expand(len(form.largest), *column.shape)) for column in columns])
    found = torch.einsum("ncbx,bxk->cbnk", pulled.flatten(3), m)  # pulled: (n, C, B, *x)
    return torch.nn.functional.pad(found, (0, maps[max(maps)].shape[-1] - m.shape[-1]) * 2)


def entering(leaf: Expansion) -> torch.Size:
    """Return the shape of a module's input."""
    return leaf.pull(leaf.y[None])[0].shape
