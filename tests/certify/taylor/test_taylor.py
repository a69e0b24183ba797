"""The Taylor certificate against ascent on small models, and its parts against dense matrices."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from certify.api import radius_of
from certify.ellipsoids.columns import Columns
from certify.image.radius_stage import RadiusStage
from certify.reaches.propagated import propagated
from certify.shared.ball import NORMS
from certify.taylor.curved import signed_forms
from certify.taylor.rivals import Rival
from certify.taylor.taylor import Taylor, TaylorStage
from tests.tools.cases import mostly_slow
from tests.tools.image_stages import analysis_of, beaten, dense, formed_losses, matrix, situation
from tests.tools.small_models import PARTS, labelled, small_model
from tests.tools.taylor_stages import analysed, exact_losses, fall, stage_of, taylor_of
from zoo.bounds.elementwise import smooth_units

UNITS = ("standard", "smooth", "stem")  # parts with smooth hidden units


@pytest.mark.parametrize(("parts", "norm", "eps"), mostly_slow(product(PARTS, NORMS, (0.05, 0.3))))
def test_ascent_finds_no_image_that_loses_more(parts: str, norm: str, eps: float) -> None:
    certifier, analysis = taylor_of(parts, norm=norm)
    assert not beaten(certifier, analysis, stage_of(analysis, eps), (eps, 0.3 * eps), exact_losses)


def test_the_first_order_alone_would_be_beaten() -> None:
    """Ascent finds more than the first order, so that the tests of random networks see a second order too small."""
    net, x, y = network(5, 2.58)
    stage = stage_of(analysed(net, x, y), 0.05)
    asked, beyond = stage._asked(stage.most_B), False
    for class_B in stage.here.rivals_BR.mT:
        (rival,) = Rival.of(stage.here, stage.ellipsoids, class_B[None])
        terms, found_B = rival.alone(), fall(net, x, y, class_B, stage.most_B)
        assert (found_B <= terms.cost(stage.most_B, asked.grown) * (1 + 1e-9)).all()
        beyond = beyond or bool((found_B > 1.001 * terms.first).any())
    assert beyond


def network(seed: int, scale: float, width: int = 12, classes: int = 3) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network of two layers of GELU units on 12 pixels, and two images of it."""
    torch.manual_seed(seed)
    layers = [nn.Linear(12, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes)]
    with torch.no_grad():
        for layer in layers[::2]:
            layer.weight.copy_(torch.randn_like(layer.weight) * scale / layer.weight.shape[1] ** 0.5)  # type: ignore
            layer.bias.normal_()  # type: ignore
    net = nn.Sequential(nn.Flatten(), *layers).double().eval()
    x = torch.rand(2, 1, 3, 4, dtype=torch.float64)
    with torch.no_grad():
        return net, x, net(x).argmax(-1)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(k, marks=pytest.mark.slow) for k in range(3, 120))])
def test_random_networks_stay_within_the_bound(seed: int) -> None:
    """Networks and radii of many sizes. As e shrinks, the bound tends to the truth: the second order is exact."""
    random = torch.Generator().manual_seed(seed)
    scale, e = (10 ** float(torch.empty(1).uniform_(*ends, generator=random)) for ends in ((-1, 0.7), (-2, 0.5)))
    net, x, y = network(seed, scale)
    stage = stage_of(analysed(net, x, y), e)
    loss_BJ = exact_losses(stage, stage.most_B)
    for rival_B in stage.here.rivals_BR.mT:
        bound_B, found_B = loss_BJ.gather(1, rival_B[:, None])[:, 0], fall(net, x, y, rival_B, stage.most_B)
        assert (found_B <= bound_B * (1 + 1e-9)).all()
    near = stage_of(analysed(net, x, y), 1e-3 / max(scale, 1.0) ** 3)
    rival_B = near.here.rivals_BR[:, 0]
    bound_B = exact_losses(near, near.most_B).gather(1, rival_B[:, None])[:, 0]
    assert (fall(net, x, y, rival_B, near.most_B) > 0.98 * bound_B).all()


@pytest.mark.slow
@pytest.mark.parametrize("parts", UNITS)
def test_what_remainders_bend_stays_within_its_bound(parts: str) -> None:
    """Draw remainders of all units within their reach, and compare |C^(1/2) b| with the bound and with `rho`."""
    _, analysis = taylor_of(parts)
    stage = stage_of(analysis, 0.2, 1e-3)
    found, grown = stage.ellipsoids, stage._asked(stage.most_B).grown
    curved = Rival.of(stage.here, found, stage.here.rivals_BR[:, :1].mT)[0].curved.units
    behind = propagated(found, {at: c.c.abs() for at, c in curved.items()}, "test", found.most_B[:, None], grown)
    bound_B = behind.at(stage.most_B, grown)[0]
    torch.manual_seed(0)
    joint, last = found.joint, max(curved)
    change = torch.randn(1, *analysis.images.shape, dtype=torch.float64)
    change = change / change.flatten(2).norm(dim=-1)[..., None, None, None] * stage.most_B[0]
    total = torch.zeros_like(bound_B)

    def visit(at: int, v: Tensor) -> Tensor | None:
        """Let every unit have the remainder of its exact change; what others add stays out."""
        nonlocal total
        forms = smooth_units(found.tape.leaves[at].forms)
        if forms is None:
            return None
        d = forms.units(v)
        linear = forms.units(linear_at[at])
        if at in curved:
            total = total + (curved[at].c[0].abs() * (d - linear)[0].square()).flatten(1).sum(1)
        r = 0.5 * forms.activation.second(forms.z_BNH) * d.square()  # type: ignore[attr-defined]
        return found.tape.spread(r, at)

    linear_at: dict[int, Tensor] = {}
    found.tape.push(change, lambda at, v: linear_at.update({at: v}), last)
    found.tape.push(change, visit, last)
    assert (total.sqrt() <= bound_B).all()
    assert joint.sources(last)


@pytest.mark.slow
def test_the_quadratic_part_is_that_of_dense_matrices() -> None:
    """The bound of the trust region is above its dense optimum, and close to it."""
    _, analysis = taylor_of("stem", count=1)
    stage = stage_of(analysis, 0.2)
    found = stage.ellipsoids
    (rival,) = Rival.of(stage.here, found, stage.here.rivals_BR[:, :1].mT)
    terms, g = rival.alone(), rival.g
    more = rival.curved.more(terms.propagated, terms.most)
    forms = signed_forms(rival.curved, more)
    size, maps = analysis.images[0].numel(), dense(found.joint, rival.margins.last)
    s = sum((matrix(found, form, at, maps)[0, 0, :size, :size] for at, form in forms.items()), torch.zeros(()))
    values, vectors = torch.linalg.eigh(s)
    assert values[-1] <= terms.top[0, 0] * (1 + 1e-9)
    b = vectors.mT @ (g.image.flatten() * stage.most_B[0])
    m = values[-1].clamp_min(0) + torch.logspace(-8, 4, 4000, dtype=torch.float64)[:, None]
    best = (0.5 * (m[:, 0] + (b.square() / (m - values)).sum(1))).min()
    quadratic = terms.quadratic(stage.most_B)[0, 0]
    assert 0.9 * quadratic < best <= quadratic * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("parts", UNITS)
def test_blocks_have_the_norms_of_dense_matrices(parts: str) -> None:
    """They are above the exact norms, and not far above where rounding is small beside them."""
    _, analysis = taylor_of(parts, count=1)
    stage = stage_of(analysis, 0.2)
    found = stage.ellipsoids
    (rival,) = Rival.of(stage.here, found, stage.here.rivals_BR[:, :1].mT)
    to_units, at_others, joint = rival.beside.to_units, rival.beside.at_others, found.joint
    assert at_others is not None
    maps = dense(joint, rival.margins.last)
    for forms, norm, sources in (
        ({at: of_leaf.with_more() for at, of_leaf in rival.curved.units.items()}, to_units.whole, to_units.leaves),
        (rival.curved.others, at_others.across, at_others.leaves),
    ):
        whole, size = sum((matrix(found, form, at, maps)[0, 0] for at, form in forms.items()), torch.zeros(())), 64
        kept = joint.only(sources, rival.margins.last, norm).entries[0, 0].bool()
        exact = torch.linalg.matrix_norm(whole[kept, :size], 2)
        assert exact * (1 - 1e-9) <= norm[0, 0] <= 2.5 * exact


@pytest.mark.slow
def test_a_model_without_smooth_units_has_at_least_the_image_certificate() -> None:
    """Only what its attention may do is known better."""
    _, taylor = taylor_of("lofast")
    _, image = analysis_of("lofast")
    e_B = torch.full((3,), 0.05, dtype=torch.float64)
    here = situation(image)
    other = RadiusStage(here, e_B, Columns.of(here.tape, here.images))
    norms = 1.005  # Lanczos meets norms to 2 %, and those of other forms a little closer or less
    assert (formed_losses(stage_of(taylor, 0.05), e_B) <= norms * formed_losses(other, e_B)).all()


@pytest.mark.slow
def test_a_stage_proves_what_that_of_image_proves() -> None:
    """A rival that the bounds of `image` settle gets no other; the others get the lesser of both."""
    _, analysis = taylor_of("stem", count=1)
    here, e_B = situation(analysis), torch.full((1,), 0.3, dtype=torch.float64)
    ours, its = (kind(here, e_B, Columns.of(here.tape, here.images)) for kind in (TaylorStage, RadiusStage))
    unknown_BJ = torch.full_like(here.clean.margin_BJ, torch.inf)
    for share in (0.5, 1.0):
        open_BJ, its_BJ = (stage.open(stage.losses(share * e_B, unknown_BJ)) for stage in (ours, its))
        assert (its_BJ.any(1) | ~open_BJ.any(1)).all()
    assert (ours.reach_B >= its.reach_B).all()


@pytest.mark.slow
def test_an_answer_hangs_neither_on_the_batch_nor_on_earlier_questions() -> None:
    model = small_model("stem", 0)
    x, y = labelled(model, 3, 2)
    whole = Taylor(model, nonce="one").analyse(x, y)
    radius_B = radius_of(whole)
    for share in (0.9, 1.1):
        eps_B = share * radius_B
        found = whole.at(eps_B)
        alone = [Taylor(model, nonce="one").analyse(x[[i]], y[[i]]).at(eps_B[[i]]) for i in range(3)]
        torch.testing.assert_close(found.loss_B, torch.cat([one.loss_B for one in alone]), rtol=1e-6, atol=1e-9)
        assert torch.equal(found.certified_B, torch.cat([one.certified_B for one in alone]))


@pytest.mark.slow
@pytest.mark.parametrize("parts", UNITS)
def test_radii_are_hardly_smaller_than_those_of_image(parts: str) -> None:
    for seed in (0, 1):
        _, taylor = taylor_of(parts, seed=seed)
        _, image = analysis_of(parts, seed=seed)
        taylor_B, image_B = radius_of(taylor), radius_of(image)
        assert (taylor_B >= 0.9 * image_B).all()  # tiny random models: 0.95 and more; committed ones: 1 and more
