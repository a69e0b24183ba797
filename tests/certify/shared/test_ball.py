"""Balls in L2 and Linf: certificates against ascent over the box, and no place where one norm stands for the other."""

import math
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from certify import certified_radius, certify, evaluate
from certify.adjoint.adjoint import Adjoint, AdjointAnalysis
from certify.adjoint.backwards import Radii
from certify.api import TOLERANCE, certifier, radius_of
from certify.image.image import Image
from certify.methods.best import Best
from certify.methods.crown import Crown
from certify.methods.lofast import LoFAST
from certify.methods.served import ServedAdjoint
from certify.shared.bake import bake
from certify.shared.ball import NORMS, Ball
from certizoo import UserError
from tests.tools.ascent import ascend, ascend_box, margin_loss
from tests.tools.cases import mostly_slow
from tests.tools.small_models import PARTS, labelled, nodes_up_to_first_block, small_model
from tests.tools.trials import served_loss

METHODS = ("lofast", "lofast_local", "adjoint", "best")
CASES = mostly_slow(product(PARTS, METHODS), ("smooth", "adjoint"), ("lofast", "lofast"), ("standard", "lofast_local"))
EPS = (0.002, 0.02, 0.1)


def inner(model: Any, x: Tensor, y: Tensor, norm: str = "linf") -> AdjointAnalysis:
    found = Adjoint(model, "a nonce", norm).analyse(x, y).parts[0][1]
    assert isinstance(found, AdjointAnalysis)
    return found


def same_eps(eps: float, count: int) -> Tensor:
    return torch.full((count,), eps, dtype=torch.float64)


# the ball itself ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [1, 2, 3, 64, 784, 3072, 150528])
def test_the_l2_ball_around_is_never_too_small(entries: int) -> None:
    """In exact arithmetic radius^2 >= d eps^2, with hardly any excess."""
    eps_B = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(entries))
    for eps, radius in zip(eps_B.tolist(), Ball("linf", entries).radius(eps_B).tolist(), strict=True):
        square = entries * Fraction(eps) ** 2
        assert square <= Fraction(radius) ** 2 <= square * (1 + Fraction(1, 10**14))
    assert torch.equal(Ball("l2", entries).radius(eps_B), eps_B)


@pytest.mark.parametrize("norm", NORMS)
def test_a_linear_function_falls_so_far(norm: str) -> None:
    """Compare with all corners of the box and the longest step of the L2 ball."""
    g = torch.randn(5, 4, 1, 2, 3, dtype=torch.float64)
    eps_B = torch.rand(4, dtype=torch.float64)
    if norm == "linf":
        corners = torch.tensor(list(product((-1.0, 1.0), repeat=6)), dtype=torch.float64)
        most = (g.flatten(2) @ corners.mT).amax(-1)
    else:
        most = g.flatten(2).norm(dim=-1)
    ball = Ball(norm, 6)
    torch.testing.assert_close(ball.length(g) * ball.radius(eps_B), most * eps_B)
    assert (ball.length(g) <= g.flatten(2).norm(dim=-1) * (1 + 1e-14)).all()
    torch.testing.assert_close(ball.eps_within(ball.radius(eps_B)), eps_B)


@pytest.mark.parametrize("wrong", ["l1", "Linf", "linf ", "", None, 2, ["l2"]])
def test_another_norm_is_refused_with_those_there_are(wrong: Any) -> None:
    model = small_model("smooth", 0)
    x, y = labelled(model, 2, 0)
    for ask in (
        lambda: certify(model, x, y, 0.1, norm=wrong),
        lambda: certified_radius(model, x, y, norm=wrong),
        lambda: evaluate(model, x, y, eps=[0.1], norm=wrong),
        lambda: LoFAST(model, wrong),
        lambda: Adjoint(model, None, wrong),
        lambda: Image(model, None, wrong),
        lambda: Best(model, None, wrong),
        lambda: Crown(model, wrong),
        lambda: ServedAdjoint(model, torch.float32, None, wrong),
    ):
        with pytest.raises(UserError, match="l2, linf"):
            ask()


# against ascent over the box ------------------------------------------------------------------------------------------


def overtaken(analysis: AdjointAnalysis, baked: Any, x: Tensor, y: Tensor, eps: float) -> Tensor:
    """Return by how much ascent over the box lowers margins beyond what their losses allow: (B,).

    The first value is of the closest rival, the second of the smallest margin.
    """
    eps_B, rival_B = same_eps(eps, len(x)), analysis.rivals_BR[:, 0]
    radii = analysis.radii(eps_B)
    loss_B = analysis.rivals(0, 1).tight(radii, torch.ones(1, len(x), dtype=torch.bool))[0]

    def lead(z: Tensor) -> Tensor:
        logits, times = baked(z), len(z) // len(y)
        chosen = logits.gather(1, torch.stack([rival_B, y], 1).repeat(times, 1))
        return chosen[:, 0] - chosen[:, 1]

    pair_B = ascend_box(lead, x.double(), eps_B, steps=40, starts=3)
    margin_B = analysis.clean.margin_BJ.gather(1, rival_B[:, None])[:, 0]
    all_B = ascend_box(margin_loss(baked, y), x.double(), eps_B, steps=20, starts=2)
    left_B = (analysis.clean.margin_BJ - analysis.losses(radii)[0]).amin(-1)
    return torch.maximum(pair_B + margin_B - loss_B, all_B + left_B)


def outrun(analysis: AdjointAnalysis, baked: Any, x: Tensor, eps: float) -> Tensor:
    """Return the largest change after the first block that ascent over the box finds, relative to its radius: (B,)."""
    behind = nodes_up_to_first_block(baked)
    radius_B = analysis.radii(same_eps(eps, len(x))).e[behind]

    def block(z: Tensor) -> Tensor:
        return baked.blocks[0](baked.embed(z)).flatten(1)

    with torch.no_grad():
        clean = block(x.double())
    far_B = ascend_box(
        lambda z: (block(z) - clean.repeat(len(z) // len(clean), 1)).norm(dim=1),
        x.double(), same_eps(eps, len(x)), steps=40, starts=3,
    )  # fmt: skip
    return far_B / radius_B


@pytest.mark.parametrize(("seed", "parts"), mostly_slow(product(range(3), PARTS), (1, "smooth")))
def test_no_ascent_over_the_box_beats_the_loss_or_the_radii(seed: int, parts: str) -> None:
    model = small_model(parts, seed)
    x, y = labelled(model, 6, seed)
    analysis, baked = inner(model, x, y), bake(model)
    for eps in EPS:
        assert (overtaken(analysis, baked, x, y, eps) <= 1e-9).all()
        assert (outrun(analysis, baked, x, eps) <= 1 + 1e-9).all()


@pytest.mark.parametrize(("parts", "method"), CASES)
def test_no_ascent_over_the_box_beats_the_radius(parts: str, method: str) -> None:
    model = small_model(parts, 0)
    x, y = labelled(model, 6, 1)
    radius_B = certified_radius(model, x, y, method=method, norm="linf")
    assert (radius_B > 1e-6).all()
    assert (ascend_box(margin_loss(bake(model), y), x.double(), radius_B, steps=60, starts=3) <= 0).all()


def test_a_first_order_term_of_the_other_norm_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted term is |g_0|_2 eps in place of |g_0|_1 eps."""
    model = small_model("smooth", 0)
    x, y = labelled(model, 6, 0)
    monkeypatch.setattr(Ball, "length", lambda self, g: g.flatten(-3).norm(dim=-1) / self._spread)
    assert (overtaken(inner(model, x, y), bake(model), x, y, 0.002) > 1e-4).all()


def test_a_forgotten_root_of_the_entries_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("smooth", 0)
    x, y = labelled(model, 6, 0)
    monkeypatch.setattr(Ball, "radius", lambda self, eps_B: eps_B)
    assert (outrun(inner(model, x, y), bake(model), x, 0.02) > 1.5).all()


def test_a_prefix_of_the_other_norm_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted prefix is ||P_k|| eps in place of ||P_k|| sqrt(d) eps; everything else is right."""
    model = small_model("smooth", 0)
    x, y = labelled(model, 6, 0)
    analysis = inner(model, x, y)
    analysis.norms.products[:] = [norm_B / math.sqrt(x[0].numel()) for norm_B in analysis.norms.products]
    assert (outrun(analysis, bake(model), x, 0.02) > 1.5).all()


# two norms of one model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", mostly_slow(PARTS, "standard", "stem"))
def test_behind_the_image_all_is_as_in_the_l2_ball_around(parts: str) -> None:
    """Every radius and remainder equals that of the L2 analysis at sqrt(d) eps.

    The losses are no larger, and differ only where the cut is at the image. Code that confuses eps with a radius would
    not agree.
    """
    model = small_model(parts, 0)
    x, y = labelled(model, 5, 0)
    box, ball = inner(model, x, y), inner(model, x, y, "l2")
    for eps in EPS:
        here = box.radii(same_eps(eps, 5))
        there = ball.radii(same_eps(eps * math.sqrt(x[0].numel()), 5))
        for one, other in ((here.e, there.e), (here.beta, there.beta)):
            torch.testing.assert_close(torch.stack(list(one)), torch.stack(list(other)), rtol=1e-12, atol=0)
        closest = box.rivals(0, 1), ball.rivals(0, 1)
        firsts = [rivals.first(radii) for rivals, radii in zip(closest, (here, there), strict=True)]
        torch.testing.assert_close(firsts[0][1:], firsts[1][1:], rtol=1e-12, atol=0)
        assert (firsts[0][0] < 0.99 * firsts[1][0]).all(), "|g|_1 is below sqrt(d) |g|_2"
        losses = [a.losses(r)[0] for a, r in ((box, here), (ball, there))]
        assert (losses[0] <= losses[1] * (1 + 1e-12)).all()


@pytest.mark.parametrize("parts", mostly_slow(PARTS, "standard", "stem"))
def test_first_order_is_exact_in_the_box(parts: str) -> None:
    """As eps -> 0, loss / eps -> |g_0|_1 by autograd."""
    model = small_model(parts, 1)
    x, y = labelled(model, 5, 0)
    analysis, eps = inner(model, x, y), 1e-8
    z = x.double().requires_grad_()
    logits = bake(model)(z)
    rival_B = analysis.rivals_BR[:, 0]
    margin_B = logits.gather(1, y[:, None]) - logits.gather(1, rival_B[:, None])
    (g,) = torch.autograd.grad(margin_B.sum(), z)
    radii = analysis.radii(same_eps(eps, 5))
    found_B = analysis.rivals(0, 1).tight(radii, torch.ones(1, 5, dtype=torch.bool))[0]
    rounding_B = (analysis.rivals(0, 1).lengths[1:, 0] * torch.stack(list(radii.off))).sum(0)
    torch.testing.assert_close(found_B - rounding_B, g.flatten(1).abs().sum(1) * eps, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize(
    ("parts", "method"),
    mostly_slow(product(("smooth", "standard"), METHODS), *product(("smooth",), METHODS[:-1])),
)
def test_radii_of_the_two_norms_stand_as_their_balls_do(parts: str, method: str) -> None:
    """The box of eps contains the L2 ball of eps and lies in that of sqrt(d) eps; the bounds are ordered alike."""
    model = small_model(parts, 0)
    x, y = labelled(model, 5, 2)
    l2_B, linf_B = (certified_radius(model, x, y, method, "n", norm) for norm in NORMS)
    slack = 1 - 4 * TOLERANCE
    assert (linf_B >= l2_B / math.sqrt(x[0].numel()) * slack).all()
    assert (linf_B * slack <= l2_B).all()
    assert (l2_B > 0).all()


@pytest.mark.parametrize(
    ("method", "norm"),
    mostly_slow(product(METHODS, NORMS), *product(METHODS[1:2], NORMS)),  # The radii of `best` are in the test above.
)
def test_an_analysis_knows_its_norm_and_answers_in_it(method: str, norm: str) -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 3, 0)
    analysis = certifier(model, method, "n", norm).analyse(x, y)
    assert analysis.ball == Ball(norm, 64)
    radius_B = radius_of(analysis)
    certificate = analysis.at(radius_B)
    assert certificate.certified_B.all()
    assert torch.equal(certificate.eps_B, radius_B)
    again = certify(model, x, y, radius_B, method, "n", norm)
    assert again.certified_B.all()


@pytest.mark.parametrize("norm", mostly_slow(NORMS, "linf"))
def test_forms_on_the_ball_of_images_are_asked_in_its_norm(norm: str) -> None:
    """`image` is no worse than `adjoint` in the same norm, and certifies nothing far beyond."""
    model = small_model("smooth", 0)
    x, y = labelled(model, 2, 0)
    adjoint, image = (certifier(model, method, "n", norm).analyse(x, y) for method in ("adjoint", "image"))
    assert image.ball == Ball(norm, 64)
    radius_B = radius_of(adjoint)
    assert image.at(radius_B).certified_B.all()
    assert not image.at(30 * radius_B).certified_B.any()


@pytest.mark.slow
def test_a_search_in_the_box_takes_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search starts with a box inside the ball with which an L2 search starts."""
    trials = dict.fromkeys(NORMS, 0)
    for seed in range(6):
        model = small_model("standard", seed)
        x, y = labelled(model, 4, seed)
        for norm in NORMS:
            analysis, asked = inner(model, x, y, norm), list[Tensor]()
            at = analysis.at
            monkeypatch.setattr(analysis, "at", lambda eps, at=at, asked=asked: asked.append(eps) or at(eps))
            radius_of(analysis)
            trials[norm] += len(asked)
    assert trials["linf"] <= 1.15 * trials["l2"]


def test_the_served_model_in_the_box() -> None:
    """Check float32 logits at the points that ascent finds, and radii below those of the exact function."""
    model = small_model("standard", 0)
    x, y = labelled(model, 4, 0)
    analysis, loss = ServedAdjoint(model, torch.float32, "n", "linf").analyse(x, y), served_loss(model, y)
    radius_B = radius_of(analysis)
    assert (radius_B > 0).all()
    assert (radius_B <= radius_of(Adjoint(model, "n", "linf").analyse(x, y)) * (1 + 2e-3)).all()
    for eps_B in (radius_B, 3 * radius_B):
        certificate = analysis.at(eps_B)
        worst_B = ascend_box(loss, x.double(), eps_B * (1 - 1e-6), steps=20, starts=3)
        assert (worst_B < 0)[certificate.certified_B].all()
        assert (-worst_B >= certificate.margin_B - certificate.loss_B - 1e-9)[torch.isfinite(certificate.loss_B)].all()


def test_what_ascent_over_a_box_finds_is_what_there_is() -> None:
    """The ascent reaches |g|_1 eps for a linear function, more than the inner L2 ball allows."""
    g, x = torch.randn(3, 1, 4, 4, dtype=torch.float64), torch.zeros(3, 1, 4, 4, dtype=torch.float64)
    eps_B = torch.tensor([0.1, 1.0, 2.0], dtype=torch.float64)

    def linear(z: Tensor) -> Tensor:
        return (z * g.repeat(len(z) // 3, 1, 1, 1)).flatten(1).sum(1)

    found_B = ascend_box(linear, x, eps_B, steps=20, starts=2)
    torch.testing.assert_close(found_B, g.flatten(1).abs().sum(1) * eps_B)
    assert (found_B > ascend(linear, x, eps_B, steps=20, starts=2) * 1.1).all()


def test_a_loss_stays_infinite_in_the_box() -> None:
    model = small_model("standard", 2)
    x, y = labelled(model, 4, 1)
    analysis = inner(model, x, y)
    assert analysis.at(0.0).certified_B.all()
    far = analysis.at(1e9)
    assert not far.certified_B.any()
    assert not torch.isnan(far.loss_B).any()
    assert isinstance(analysis.radii(same_eps(1e300, 4)), Radii)
