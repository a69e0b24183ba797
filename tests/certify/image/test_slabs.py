"""Slabs of a ball: they cover it, no image of it loses more than they say, and they prove nearly the first order."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from certify import certify
from certify.image import slabs
from certify.image.image import ImageAnalysis
from certify.image.radius_stage import RadiusStage
from certify.image.situation import Situation, slope
from certify.image.slabs import Slabs
from certify.methods.served import ServedTaylor
from certify.shared.ball import NORMS
from certify.taylor.taylor import Taylor
from tests.tools.cases import mostly_slow
from tests.tools.image_stages import fallen, situation
from tests.tools.small_models import PARTS, labelled, small_model
from tests.tools.taylor_stages import taylor_of
from tests.tools.trials import attacked

COUNT = 3
SHARES = (0.7, 0.8, 0.9, 0.97)  # of the radius at which the first order alone uses up a margin


def recorded(own: Slabs) -> tuple[Slabs, list[tuple[Tensor, Tensor]]]:
    """Return slabs that list the centers and radii of their stages."""
    balls = list[tuple[Tensor, Tensor]]()

    def stage(here: Situation, radius_B: Tensor) -> RadiusStage:
        balls.append((here.images, radius_B))
        return own.stage(here, radius_B)

    return replace(own, stage=stage), balls


def in_slabs(analysis: ImageAnalysis, e_B: Tensor, cut: Slabs | None = None) -> tuple[Tensor, Tensor, RadiusStage]:
    """Bound the margins over the closest rival by first order and rest, and in slabs; also return the stage."""
    here = situation(analysis)
    stage = analysis._stage(here, e_B, cut or analysis._slabs)
    class_B, asked = here.rivals_BR[:, 0], stage._asked(e_B)
    stage._formed = [stage._formed_of(class_B[None])]
    whole_B = here.first(class_B[None])[0] * e_B + stage.rest(class_B, asked)
    return whole_B, stage.by_parts(class_B, torch.ones_like(class_B, dtype=torch.bool), asked), stage


@dataclass(frozen=True)
class OneImage:
    """An image in several slabs: the bounds of the whole ball and of its slabs, and the balls of these."""

    certifier: Taylor
    analysis: ImageAnalysis
    e_B: Tensor
    whole_B: Tensor
    loss_B: Tensor
    stage: RadiusStage
    balls: list[tuple[Tensor, Tensor]]


@cache
def one_image(parts: str, seed: int, norm: str) -> OneImage:
    model = small_model(parts, seed)
    x, y = labelled(model, COUNT, 1)
    certifier = Taylor(model, "a nonce", norm)
    ((_, analysis),) = certifier.analyse(x[2:], y[2:]).parts
    assert isinstance(analysis, ImageAnalysis)
    e_B = (0.97 if norm == "l2" else 0.72) * analysis._first_order.end_B
    cut, balls = recorded(analysis._slabs)
    return OneImage(certifier, analysis, e_B, *in_slabs(analysis, e_B, cut), balls)


@pytest.mark.parametrize(("parts", "norm", "seed", "share"), mostly_slow(product(PARTS, NORMS, (0, 1), SHARES)))
def test_no_image_of_the_ball_loses_more(parts: str, norm: str, seed: int, share: float) -> None:
    certifier, analysis = taylor_of(parts, norm=norm, seed=seed)
    e_B = share * analysis._first_order.end_B
    _, loss_B, stage = in_slabs(analysis, e_B)
    assert (fallen(certifier, analysis, stage.here.rivals_BR[:, 0], e_B) <= loss_B * (1 + 1e-9)).all()


@pytest.mark.parametrize(
    ("parts", "seed", "norm"),
    mostly_slow([("stem", 0, "l2"), ("standard", 1, "l2"), ("standard", 1, "linf")], ("standard", 1, "l2")),
)
def test_slabs_prove_what_the_whole_ball_does_not(parts: str, seed: int, norm: str) -> None:
    one = one_image(parts, seed, norm)
    found_B = fallen(one.certifier, one.analysis, one.stage.here.rivals_BR[:, 0], one.e_B)
    assert found_B <= one.loss_B < one.analysis.clean.margin_BJ.amin(1) < one.whole_B


@pytest.mark.parametrize(("parts", "norm", "share"), mostly_slow(product(PARTS, NORMS, SHARES), ("stem", "l2", 0.7)))
def test_no_attack_of_the_served_model_succeeds_where_at_proves(parts: str, norm: str, share: float) -> None:
    model = small_model(parts, 0)
    x, y = labelled(model, COUNT, 1)
    ((_, analysis),) = ServedTaylor(model, torch.float32, "a nonce", norm).analyse(x, y).parts
    assert isinstance(analysis, ImageAnalysis)
    eps_B = share * analysis.ball.eps_within(analysis._first_order.end_B)
    certified_B = analysis.at(eps_B).certified_B
    found_B = attacked(model, x, y, eps_B, norm, 8, served=True)
    assert (found_B[certified_B] < 0).all()


@pytest.mark.parametrize(("parts", "seed"), mostly_slow([("stem", 0), ("standard", 1)], ("standard", 1)))
def test_slabs_cover_the_ball(parts: str, seed: int) -> None:
    """Every image of the ball lies in the ball of the center of its slab. Every center counts in the probability."""
    one = one_image(parts, seed, "l2")
    analysis, stage, e_B, balls = one.analysis, one.stage, one.e_B, one.balls
    assert one.loss_B.isfinite().all()
    assert balls
    assert (stage.failure_B >= stage.ellipsoids.failure * (1 + 0.2 * len(balls))).all()
    x, g = analysis.images[0].flatten(), stage.here.gradients(stage.here.rivals_BR[:, :1].mT).image.flatten()
    u = -g / g.norm()
    torch.manual_seed(0)
    along = e_B * (2 * torch.rand(4000, dtype=torch.float64) - 1)
    aside = torch.randn(4000, len(x), dtype=torch.float64)
    aside = aside - (aside @ u)[:, None] * u
    aside = aside / aside.norm(dim=1, keepdim=True) * (e_B.square() - along.square()).sqrt()[:, None]
    changes = along[:, None] * u + aside  # on the sphere
    starts = [float((center[0].flatten() - x) @ u) for center, _ in balls]
    for start, end, (center, radius_B) in zip(starts, [*starts[1:], float(e_B)], balls, strict=True):
        inside = changes[(along >= start) & (along <= end)]
        assert len(inside)
        assert ((inside + x - center[0].flatten()).norm(dim=1) <= radius_B).all()


def turning(margin: float) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model with m(x + G) = margin - <u, G> + h <u, G> <v, G> at a grey image, that image and its label.

    u is along all pixels, v along the first one without its part along u. So the gradient turns towards one pixel, as
    far as G goes along u, and in Linf that pixel may still move by all of eps.
    """
    pixels, scale = 64, 0.02
    u, v = torch.ones(pixels) / pixels**0.5, torch.eye(pixels)[0] - 1 / pixels
    v = v / v.norm()
    rows = scale * torch.stack([u + v, -u - v, u - v, v - u, u, -u])
    product_of = 0.6 / (4 * scale**2 * (2 / torch.pi) ** 0.5)  # gelu(z) + gelu(-z) = (2 / pi)^(1/2) z^2 + O(z^4)
    weights = torch.tensor([product_of, product_of, -product_of, -product_of, -1 / scale, 1 / scale]) / 2
    hidden, head = nn.Linear(pixels, 6), nn.Linear(6, 2)
    with torch.no_grad():
        hidden.weight.copy_(rows)
        hidden.bias.copy_(-rows.sum(1) / 2)
        head.weight.copy_(torch.stack([weights, -weights]))
        head.bias.copy_(torch.tensor([margin / 2, -margin / 2]))
    return nn.Sequential(nn.Flatten(), hidden, nn.GELU(), head).eval(), torch.full((1, 1, 8, 8), 0.5), torch.tensor([0])


@pytest.mark.parametrize(
    ("method", "margin"), mostly_slow(product(("image", "taylor", "best"), (1.07, 1.08, 1.09)), ("image", 1.07))
)
def test_in_linf_a_pixel_may_move_by_eps_around_every_center(method: str, margin: float) -> None:
    model, x, y = turning(margin)
    eps_B = torch.tensor([0.125], dtype=torch.float64)
    assert float(attacked(model, x, y, eps_B, "linf", 8)) > 0
    assert not certify(model, x, y, eps_B, method=method, norm="linf").certified_B.any()
    enough, x, y = turning(1.25)
    assert certify(enough, x, y, eps_B, method=method, norm="linf").certified_B.all()


def test_a_slope_that_is_too_small_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    certifier, analysis = taylor_of("standard")
    e_B = 0.9 * analysis._first_order.end_B
    monkeypatch.setattr(slabs, "slope", lambda g, along_BCHW: 0.5 * slope(g, along_BCHW))
    _, loss_B, stage = in_slabs(analysis, e_B)
    assert (fallen(certifier, analysis, stage.here.rivals_BR[:, 0], e_B) > loss_B).any()


@pytest.mark.slow
def test_an_answer_does_not_depend_on_the_batch() -> None:
    model = small_model("stem", 0)
    x, y = labelled(model, COUNT, 2)
    (part,) = Taylor(model, nonce="one").analyse(x, y).parts
    eps_B = 0.9 * part[1]._first_order.end_B  # type: ignore[attr-defined]
    found = part[1].at(eps_B)
    alone = [Taylor(model, nonce="one").analyse(x[[i]], y[[i]]).at(eps_B[[i]]) for i in range(COUNT)]
    torch.testing.assert_close(found.loss_B, torch.cat([one.loss_B for one in alone]), rtol=1e-6, atol=1e-9)
    assert torch.equal(found.certified_B, torch.cat([one.certified_B for one in alone]))
