"""Rounding inside the maps M_i: a float32 push equals the exact push of a slightly different u."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from certify.ellipsoids.joint import NOISE, Joint, Noise, Scale
from certify.ellipsoids.measured import COARSE, SIZES, identity
from certify.ellipsoids.rounding import ALLOWED, Rounding
from certify.ellipsoids.weights import MOVED
from certify.image.image import Image, ImageAnalysis
from tests.tools.cases import mostly_slow
from tests.tools.image_stages import analysis_of, dense, stage_of
from tests.tools.in_float32 import UNITS, InFloat32, in_float32, rounded_by
from tests.tools.small_models import PARTS, labelled, small_model
from zoo.arithmetic import nan_to_inf
from zoo.bounds.tape import Vectors

E, MANY = 0.05, 6


def seen(joint: Joint, last: int, u: Tensor) -> Vectors:
    """Return H_i of every leaf up to the last one."""
    found = Vectors()
    joint.push(u, lambda at, v: found.update({at: v}), last)
    return found


def some(joint: Joint, last: int) -> Iterator[Tensor]:
    """Return test vectors: random, image only, noise only, of one sign, and some pulled from the end."""
    random = torch.Generator().manual_seed(0)
    u = torch.randn(MANY, len(joint.most_B), joint.room(last), generator=random, dtype=torch.float64)
    image = torch.zeros_like(u)
    image[..., : joint.images[0].numel()] = 1.0
    yield from (in_float32(one) for one in (u, u.abs(), u * image, u * joint.part(NOISE, last)))
    h = seen(joint, last, u)[last]
    yield in_float32(joint.pull({last: torch.randn(h.shape, generator=random, dtype=h.dtype)}, last))


@pytest.mark.parametrize(("parts", "quieter"), mostly_slow(product(PARTS, (1, 30)), ("smooth", 1)))
def test_a_push_is_that_of_a_slightly_other_u(parts: str, quieter: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the closest u' with fl(M_i u) = M_i u', check |u' - u| <= share / 2 |u| over all leaves.

    Then |<a, fl(M_i u)> - <a, M_i u>| <= |M_i^T a| share / 2 |u| for all a. A planted share that ignores leaves is
    detected where there is little noise and no remainder.
    """
    _, analysis = analysis_of(parts, count=2)
    ellipsoids = stage_of(analysis, E).ellipsoids
    joint, rounding = ellipsoids.joint, ellipsoids.rounding
    if quieter > 1:
        weights = {at: weight_B / quieter for at, weight_B in joint.noise.weights.items()}
        joint = Joint(joint.tape, joint.images, joint.most_B, {}, Noise(weights, joint.noise.lengths))
        rounding = Rounding(joint, rounding.sizes)
    assert 1e-6 < pushed_off(joint, rounding) <= 1
    monkeypatch.setattr(Rounding, "_own", lambda self, at: torch.zeros_like(self.joint.most_B))
    assert quieter == 1 or pushed_off(joint, rounding) > 1


def pushed_off(joint: Joint, rounding: Rounding) -> float:
    """Return the error of a push relative to its bound."""
    most, last = 0.0, max(joint.tape.leaves)
    maps = dense(joint, last)
    for u in some(joint, last):
        exact = seen(joint, last, u)
        with InFloat32():
            found = seen(joint, last, u)
        for at in list(exact)[1:]:
            off_BXC = (found[at] - exact[at]).flatten(2).permute(1, 2, 0)
            moved_BNC = least_solution(maps[at], off_BXC)
            share = moved_BNC.norm(dim=1).mT / (UNITS * rounding.share(at) / 2 * u.norm(dim=-1))
            most = max(most, float(nan_to_inf(share).max()))
    return most


def least_solution(map_BXN: Tensor, y_BXC: Tensor) -> Tensor:
    """Return the u of least norm with M u = y, from M^T = Q R. Rows have length 1 first: only noise moves some."""
    length_BX1 = map_BXN.norm(dim=-1, keepdim=True)
    scale_BX1 = torch.where(length_BX1 > 0, 1 / length_BX1, 0.0)
    images = zip(scale_BX1 * map_BXN, scale_BX1 * y_BXC, strict=True)
    return torch.stack([_by_rows(m_XN, y_XC) for m_XN, y_XC in images])


def _by_rows(m_XN: Tensor, y_XC: Tensor) -> Tensor:
    """Return it for one image. Equal rows are one equation, and rows of zeros are none."""
    rows_YN, inverse = torch.unique(m_XN, dim=0, return_inverse=True)
    first = torch.full((len(rows_YN),), len(inverse)).scatter_reduce(0, inverse, torch.arange(len(inverse)), "amin")
    assert torch.equal(y_XC, y_XC[first][inverse])
    some = (rows_YN != 0).any(1)
    q, r = torch.linalg.qr(rows_YN[some].mT)
    return q @ torch.linalg.solve_triangular(r.mT, y_XC[first][some], upper=False)


def pulled(joint: Joint, last: int, v: Tensor) -> Tensor:
    return joint.pull({last: v}, last)


@pytest.mark.parametrize("parts", mostly_slow(PARTS, "smooth"))
def test_a_pull_is_off_by_a_share_of_what_arrives(parts: str) -> None:
    _, analysis = analysis_of(parts, count=2)
    ellipsoids = stage_of(analysis, E).ellipsoids
    joint, most = ellipsoids.joint, 0.0
    random = torch.Generator().manual_seed(1)
    for last in [at for at in joint.tape.leaves if at > joint.tape.nonlinear[0]]:
        shape = seen(joint, last, torch.zeros(1, len(joint.most_B), joint.room(last)).double())[last].shape[1:]
        g = torch.randn(MANY, *shape, generator=random, dtype=torch.float64)
        for one in (g, g.sign(), g.abs()):
            v = in_float32(one)
            exact, off = joint.pull({last: v}, last), rounded_by(partial(pulled, joint, last), v)
            share = off.norm(dim=-1) / (exact.norm(dim=-1) * UNITS * ellipsoids.rounding.share(last) / 2)
            most = max(most, float(nan_to_inf(share).max()))
    assert 1e-7 < most <= 1


@pytest.mark.parametrize("parts", mostly_slow(PARTS, "standard"))
def test_products_are_off_by_what_norms_are_told(parts: str) -> None:
    """|fl(sum_i M_i^T C_i M_i u) - that| stays below the share of the norm.

    The share covers the rounding of maps and forms and the shift for the latter. The cases include a scale.
    """
    _, analysis = analysis_of(parts, count=2)
    stage = stage_of(analysis, E)
    ellipsoids, class_CB = stage.ellipsoids, stage.here.rivals_BR[:, :1].mT
    margins = ellipsoids.margins(stage.here.gradients(class_CB).leaves, class_CB)
    forms, joint, rounding = margins.forms, ellipsoids.joint, ellipsoids.rounding
    gram, most = joint.gram(forms), 0.0
    own = torch.stack([rounding.of_form(at, form) for at, form in forms.items()]).sum(0)
    told = UNITS * (rounding.share(margins.last) * margins.norm.square() + own)
    for u in some(joint, margins.last):
        off = rounded_by(gram, u).norm(dim=-1)
        most = max(most, float(nan_to_inf(off / (told * u.norm(dim=-1))).max()))
    assert 0 < most <= 1
    shift = rounding.shift(forms)
    assert (own <= rounding.left(margins.last) * shift * (1 + 1e-9)).all()
    assert (shift < 1e-3 * margins.norm.square()).all(), "room for rounding is cheap"


@pytest.mark.parametrize("parts", mostly_slow(PARTS, "standard"))
def test_sizes_are_those_of_dense_maps(parts: str) -> None:
    """Sizes are never too small, for all leaves at once too; single pairs of leaves may be a few times too large."""
    _, analysis = analysis_of(parts, count=2)
    ellipsoids = stage_of(analysis, E).ellipsoids
    sizes, joint = ellipsoids.rounding.sizes, ellipsoids.joint
    maps = dense(joint, max(joint.tape.leaves))
    assert set(sizes) == set(maps)
    for at, size_B in sizes.items():
        exact_B = torch.linalg.matrix_norm(maps[at], 2)
        assert (size_B >= exact_B).all()
        formed = at in joint.tape.nonlinear and joint.tape.leaves[at].forms is not None
        assert (size_B <= (COARSE * 1.01 if formed else 10 * len(maps) ** 0.5) * exact_B).all()
    ones = {at: identity(joint.ones_B) for at in maps}
    norm_B = ellipsoids.seminorms(ones, "all", [joint.most_B[:, None]], COARSE)[0]
    whole = sum((m.mT @ m for m in maps.values()), torch.zeros(()).double())
    exact_B = torch.linalg.eigvalsh(whole)[:, -1].sqrt()
    assert (norm_B >= exact_B).all()
    assert (norm_B <= COARSE * 1.01 * exact_B).all()


@pytest.mark.slow
def test_a_share_is_that_of_all_leaves_in_front() -> None:
    """The share is 2 (sum_l (eps_l / w_l)^2)^(1/2).

    Less noise makes it larger, and so does a leaf that follows nothing but the leaves before it. Behind a scale it is
    in units of that scale's noise.
    """
    _, analysis = analysis_of("standard", count=2)
    joint, rounding = stage_of(analysis, E).ellipsoids.joint, stage_of(analysis, E).ellipsoids.rounding
    leaves = list(rounding.sizes)
    shares = [rounding.share(at) for at in leaves]
    assert all((one <= other).all() for one, other in pairwise(shares))
    off = torch.stack([rounding._own(at) / joint.noise.weights[at] for at in leaves[:-1]])
    by_hand = 2 * off.norm(dim=0)
    torch.testing.assert_close(shares[-1], by_hand, rtol=1e-6, atol=1e-14)
    quiet = Noise({at: weight_B / 10 for at, weight_B in joint.noise.weights.items()}, joint.noise.lengths)
    less = Joint(joint.tape, joint.images, joint.most_B, joint.weights, quiet)
    torch.testing.assert_close(Rounding(less, rounding.sizes).share(leaves[-1]), 10 * by_hand, rtol=1e-3, atol=1e-14)
    two, one = torch.full((1, 2), 2.0).double(), torch.ones(1, 2).double()
    scaled = rounding.share(leaves[-1], Scale(one[..., None], two, one / 4))
    torch.testing.assert_close(scaled[0], 8 * by_hand, rtol=1e-3, atol=1e-14)


def cancelling(size: float) -> Any:
    """Return a model whose two equal hidden units enter the sum with this weight and its negative."""
    model = small_model("standard", 0)
    mlp = model.blocks[0].mlp
    with torch.no_grad():
        for p in (mlp.fc1.weight, mlp.fc1.bias):
            p[1] = p[0]
        mlp.fc2.weight[:, 0] = size
        mlp.fc2.weight[:, 1] = -size
    return model


@pytest.mark.hostile
@pytest.mark.parametrize("size", mostly_slow([1.0, 2.0**80], 2.0**80))
@pytest.mark.slow
def test_a_map_whose_weights_cancel_has_no_norm(size: float) -> None:
    """Products that round 2^27 times what remains give no bound and no certificate.

    The model is served in float64, because its float32 version differs too much and is refused.
    """
    model = cancelling(size).double()
    x = labelled(small_model("standard", 0), 2, 1)[0].double()
    ((_, analysis),) = Image(model, nonce="a nonce").analyse(x, model(x).argmax(-1)).parts
    assert isinstance(analysis, ImageAnalysis)
    found = stage_of(analysis, E).ellipsoids
    behind = [at for at in found.tape.nonlinear if at > found.tape.nonlinear[0]]
    whole = {at: identity(found.joint.ones_B) for at in (max(found.tape.leaves),)}
    norm_B = found.seminorms(whole, "whole", [found.joint.most_B[:, None]], COARSE)[0]
    shares = found.rounding.share(max(found.tape.leaves))
    if size == 1.0:
        assert (shares < ALLOWED).all()
        assert torch.isfinite(norm_B).all()
        return
    assert (shares > ALLOWED).all()
    assert torch.isinf(norm_B).all()
    assert all(torch.isinf(found.rests[at].norm_B).all() for at in behind)
    assert not analysis.at(1e-3).certified_B.any()


@pytest.mark.slow
def test_the_noise_leaves_room_for_the_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Lanczos allow less rounding: the noise grows until the maps have room; before, no bound was left.

    It met a stem of 768 channels: the rounding of its convolutions was 1.4 times what was allowed.
    """
    _, analysis = analysis_of("standard", count=2)
    before = stage_of(analysis, E).ellipsoids.rounding
    last = max(before.sizes)
    allowed = SIZES * float(before.share(last).min()) / 20
    monkeypatch.setattr("certify.ellipsoids.weights.ALLOWED", allowed)
    after = stage_of(analysis, E).ellipsoids.rounding
    assert bool((SIZES * after.share(last) <= allowed / MOVED).all())  # sizes are estimated as MOVED times lengths
    assert bool((4 * after.share(last) <= before.share(last)).all())
    assert all(bool(torch.isfinite(size_B).all()) for size_B in after.sizes.values())
