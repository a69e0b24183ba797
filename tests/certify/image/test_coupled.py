"""The coupled bound of first order and remainders, against dense matrices and ascent over all allowed vectors."""

from itertools import product

import pytest
import torch
from torch import Tensor

from certify.ellipsoids.columns import Columns
from certify.ellipsoids.joint import IMAGE, NOISE
from certify.ellipsoids.measured import COARSE
from certify.image import coupled as module
from certify.image.radius_stage import Formed, RadiusStage
from tests.tools.cases import mostly_slow
from tests.tools.image_stages import analysis_of, dense, matrix, off_by
from tests.tools.small_models import PARTS

STEPS, STARTS = 60, 2
SHARES = (1.0, 0.3)  # shares of the largest radius


def formed_of(parts: str, e: float, off: float = 0.0, count: int = 1) -> tuple[RadiusStage, Formed]:
    """Return the form of the closest rival for `count` images, with node ends off by `off`."""
    _, analysis = analysis_of(parts, count=count)
    here = off_by(analysis, off)
    stage = RadiusStage(here, torch.full((count,), e).double(), Columns.of(here.tape, here.images))
    return stage, stage._formed_of(here.rivals_BR[:, :1].mT)


def forms_of(stage: RadiusStage, formed: Formed) -> tuple[Tensor, dict[int, Tensor]]:
    """Return S (C, B, n, n) and Q_k (1, B, n, n) for the leaves whose remainders have a form."""
    ellipsoids, last = stage.ellipsoids, formed.margins.last
    maps = dense(ellipsoids.joint, last)
    rests = {k: ellipsoids.rests[k].form for k in ellipsoids.joint.sources(last)}
    s = sum((matrix(ellipsoids, form, at, maps) for at, form in formed.margins.forms.items()), torch.zeros(()))
    return s, {k: matrix(ellipsoids, form, k, maps) for k, form in rests.items() if form is not None}


def slope_of(stage: RadiusStage, formed: Formed) -> Tensor:
    """Return b (C, B, n), up to its sign."""
    g_0 = stage.here.gradients(formed.class_CB).image
    flat = g_0.flatten(2) * stage.most_B[:, None]
    room = stage.ellipsoids.joint.room(formed.margins.last)
    return torch.nn.functional.pad(flat, (0, room - flat.shape[-1]))


def worst(stage: RadiusStage, formed: Formed, s: Tensor, q: dict[int, Tensor], share: float) -> Tensor:
    """Return the largest <b, u> + <u, S u> / 2 that ascent finds within the constraints at a share of the largest e."""
    joint, last = stage.ellipsoids.joint, formed.margins.last
    b, grown = slope_of(stage, formed), stage.ellipsoids.at(share * stage.most_B)
    parts = {name: joint.part(name, last) for name in (IMAGE, NOISE, *joint.sources(last))}
    torch.manual_seed(0)
    found = torch.full(b.shape[:2], -torch.inf, dtype=b.dtype)
    v = torch.randn(STARTS, *b.shape, dtype=b.dtype)
    v[0] = b
    v.requires_grad_()
    optimiser = torch.optim.Adam([v], lr=0.1)
    for _ in range(STEPS):
        u = torch.zeros_like(v)
        for name, mask in parts.items():
            if name == IMAGE:
                most = torch.full_like(u[..., 0], share)
            elif name == NOISE:
                most = grown.theta_0[last].sqrt().expand_as(u[..., 0])
            else:
                most = grown.theta[name].expand_as(u[..., 0])
                if name in q:
                    held = torch.einsum("scbn,cbnk,scbk->scb", u, q[name].expand(len(b), -1, -1, -1), u)
                    most = torch.minimum(most, held)
                most = (most + 1e-300).sqrt()
            piece = v * mask
            length = piece.norm(dim=-1, keepdim=True).clamp_min(1e-30)
            u = u + piece / length * torch.minimum(most[..., None], length * most[..., None] * 1e3)
        value = (b * u).sum(-1) + 0.5 * torch.einsum("scbn,cbnk,scbk->scb", u, s, u)
        found = torch.maximum(found, value.detach().amax(0))
        optimiser.zero_grad()
        (-value.sum()).backward()
        optimiser.step()
    return found


@pytest.mark.parametrize(
    ("parts", "off", "share"), mostly_slow(product(PARTS, (0.0, 1e-3), SHARES), ("smooth", 1e-3, 1.0))
)
@pytest.mark.slow
def test_no_ascent_within_the_constraints_beats_it(parts: str, off: float, share: float) -> None:
    stage, formed = formed_of(parts, 0.1, off)
    e_B = share * stage.most_B
    bound = formed.coupled.cost(e_B, stage.ellipsoids.at(e_B))
    assert (worst(stage, formed, *forms_of(stage, formed), share) <= bound * (1 + 1e-9)).all()


@pytest.mark.slow
def test_ascent_reaches_most_of_it() -> None:
    """Ascent comes close to the bound, so the test above would detect a bound that is too small."""
    stage, formed = formed_of("smooth", 0.1, count=2)
    share = worst(stage, formed, *forms_of(stage, formed), 1.0) / formed.coupled.cost(
        stage.most_B, stage.ellipsoids.at(stage.most_B)
    )
    assert share.min() > 0.5
    assert share.max() > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS)
def test_kappa_and_the_inverse_are_those_of_dense_matrices(parts: str) -> None:
    """Check all choices of multipliers that `cost` tries."""
    stage, formed = formed_of(parts, 0.05, 1e-3)
    c, (s, q), b = formed.coupled, forms_of(stage, formed), slope_of(stage, formed)
    assert isinstance(c, module.Coupled)
    joint, last = stage.ellipsoids.joint, formed.margins.last
    masks = {part: joint.part(part, last) for part in c.weights}
    a = s + sum((c.held[k] * c.weights[k])[..., None, None] * q_k for k, q_k in q.items())
    d = diagonal(c.weights, masks)
    known = torch.isfinite(c.kappa)
    assert known.any()
    top = torch.linalg.eigvalsh(a * d.rsqrt()[..., None] * d.rsqrt()[..., None, :])[..., -1]
    assert (c.kappa >= top * (1 - 1e-9))[known].all()
    assert (c.kappa <= top * COARSE**2 + 1e-12)[known].all()
    for spare, steep in product(module.SPARE, module.STEEP):
        share = c.kappa + spare
        m = torch.maximum(share * c.weights[IMAGE], steep * c.length)
        p = torch.diag_embed(diagonal({k: share * w for k, w in c.weights.items()} | {IMAGE: m}, masks)) - a
        root, failed = torch.linalg.cholesky_ex(p)
        assert (failed == 0)[known].all(), "not positive definite"
        inverse = torch.linalg.solve_triangular(root, b[..., None], upper=False).square().sum((-2, -1))
        assert (c.inverse(m, spare) >= inverse * (1 - 1e-9))[known].all()


def diagonal(weights: dict[int, Tensor], masks: dict[int, Tensor]) -> Tensor:
    return sum((w[..., None] * masks[part] for part, w in weights.items()), torch.zeros(()).double())
