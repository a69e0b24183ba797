"""Linear maps around a clean batch: lengths and norms against dense Jacobians and ascent."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import zoo
from certify.ellipsoids.columns import Columns
from certify.ellipsoids.ellipsoid import Ellipsoids
from certify.ellipsoids.joint import Joint, Noise, Sizes
from certify.ellipsoids.measured import COARSE
from certify.image.image import Image, ImageAnalysis
from certify.image.radius_stage import RadiusStage
from certify.image.situation import Situation
from certify.methods.served import ServedTaylor
from certify.photos.photo import read
from certify.photos.samples import sample_of
from certify.shared.quantiles import least_square_sum
from tests.tools.ascent import ascend
from tests.tools.cases import mostly_slow
from tests.tools.image_stages import SMOOTH, analysis_of, dense, entering, look, matrix, situation, stage_of
from tests.tools.small_models import PARTS
from zoo.bounds.curvature import expansion_of
from zoo.bounds.elementwise import UnitForms
from zoo.bounds.tape import Tape, Vectors


@pytest.mark.parametrize("parts", mostly_slow(PARTS, "lofast"))
def test_the_tape_is_the_model(parts: str) -> None:
    """The pulled vector at the image equals autograd's gradient, and pushing is the transpose of pulling."""
    certifier, analysis = analysis_of(parts)
    here = situation(analysis)
    x = analysis.images.clone().requires_grad_()
    logits = certifier.baked(x)
    label_B = analysis.clean.label_B
    rival_B = (label_B + 1) % logits.shape[1]
    margin_B = logits.gather(1, label_B[:, None]) - logits.gather(1, rival_B[:, None])
    (wanted,) = torch.autograd.grad(margin_B.sum(), x)
    found = here.gradients(rival_B[None])
    torch.testing.assert_close(found.image[0], wanted)
    joint = stage_of(analysis, 0.1).ellipsoids.joint
    last = max(here.tape.leaves)
    u = torch.randn(2, len(x), joint.room(last), dtype=torch.float64)
    seen = Vectors()
    joint.push(u, lambda at, v: seen.update({at: v}), last)
    g = {at: torch.randn_like(v) for at, v in seen.items()}
    pushed = sum(float((seen[at] * g[at]).sum()) for at in seen)
    assert pushed == pytest.approx(float((u * joint.pull(g, last)).sum()), rel=1e-9)


def unit_vectors(room: torch.Size) -> Tensor:
    """Return all unit vectors of inputs of this shape."""
    return torch.eye(room[1:].numel(), dtype=torch.float64).view(-1, 1, *room[1:]).expand(-1, *room)


def nothing(_: Tensor) -> Sizes:
    """Return no lengths known from elsewhere."""
    return {}


def measured(analysis: ImageAnalysis, e: float) -> Ellipsoids:
    """Return ellipsoids that use nothing but the maps."""
    here = situation(analysis)
    joint = stage_of(analysis, e).ellipsoids.joint
    return Ellipsoids(joint, here.draw, nothing, here.off, Columns.of(here.tape, here.images))


@pytest.mark.parametrize("parts", mostly_slow(PARTS, "lofast", "standard"))
def test_known_lengths_are_not_exceeded(parts: str) -> None:
    """Check lengths before nodes by ascent, and lengths inside nodes by singular values."""
    certifier, analysis = analysis_of(parts, count=2)
    here, e_B = situation(analysis), torch.full((2,), 0.1, dtype=torch.float64)
    sizes, radii = here.sizes(e_B), here.radii(e_B)
    assert len(here.tape.gains) == len(certifier.nodes)
    for count, (gains, expansion) in enumerate(zip(here.tape.gains, analysis.inner.chain.expansions, strict=True)):
        start = min(gains)
        assert (farthest(certifier, here.images, count, e_B) <= sizes[start] * (1 + 1e-9)).all()
        alone, seen = Tape([expansion]), Vectors()
        first = min(alone.leaves)
        alone.push(unit_vectors(entering(alone.leaves[first])), partial(look, seen), max(alone.leaves))
        for at in gains:
            longest_B = torch.linalg.matrix_norm(seen[at - start + first], 2)
            assert (longest_B * radii[count] <= sizes[at] * (1 + 1e-9)).all()


@pytest.mark.parametrize("parts", mostly_slow(SMOOTH, "standard"))
def test_weights_differ_only_where_entries_have_bounds_of_their_own(parts: str) -> None:
    """The largest 1 / W counts where only a length is bounded, and smaller ones beside it would gain nothing."""
    _, analysis = analysis_of(parts, count=1)
    stage, uneven = stage_of(analysis, 0.05), 0
    for at, weight in stage.ellipsoids.joint.weights.items():
        forms = stage.here.tape.leaves[at].forms
        if forms is not None:
            groups = weight.flatten(-forms.pooled) if forms.pooled else weight[..., None]
            torch.testing.assert_close(groups.amax(-1), groups.amin(-1))
            uneven += bool(weight.amax() > 1.1 * weight.amin())
    assert uneven


@pytest.mark.slow
def test_lengths_of_the_adjoint_analysis_make_the_forms_of_a_trained_model_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small random models gain nothing: there, maps alone bound changes as well."""
    model, photo = zoo.create_model("cert_gpsa_vit_c10", pretrained=True).eval(), sample_of("ship")
    assert photo is not None
    x = read(photo, 3, 32).image_CHW[None]

    def loss() -> float:
        analysis = ServedTaylor(model, torch.float32, "one").analyse(x, torch.tensor([8]))
        return float(analysis.at(0.5).loss_B)

    with_lengths = loss()
    monkeypatch.setattr(Situation, "sizes", lambda *_: {})
    assert with_lengths < 0.98 * loss()


@pytest.mark.slow
@pytest.mark.parametrize("parts", mostly_slow(SMOOTH, "standard"))
def test_reaches_and_seminorms_are_those_of_dense_maps(parts: str) -> None:
    """The bounds are never below the exact values, and as close as each one promises."""
    _, analysis = analysis_of(parts)
    found = measured(analysis, 0.05)
    maps, grown = dense(found.joint, found.tape.nonlinear[-1]), found.at(found.most_B)
    formed = 0
    for at, rest in found.rests.items():
        forms, root_B = found.tape.leaves[at].forms, grown.before[at].sqrt()
        if forms is None:
            share_B = rest.norm_B / torch.linalg.matrix_norm(maps[at], 2)
            assert (share_B >= 1 - 1e-9).all()
            assert (share_B < 1.21).all()
            continue
        formed += 1
        room = entering(found.tape.leaves[at])
        columns = maps[at].permute(2, 0, 1).unflatten(-1, room[1:])
        assert rest.reach is not None
        exact = forms.squares(columns).sqrt() * root_B.view(-1, *(1,) * (rest.reach.ndim - 1))
        finite = torch.isfinite(exact)
        assert (rest.reach >= exact - 1e-9)[finite].all()
        if isinstance(forms, UnitForms):
            assert (rest.reach <= 1.5 * exact + 1e-9).all()
        form = forms.of_rest(rest.reach, 1 / found.joint.weights[at])
        c = form.apply(unit_vectors(room)).flatten(2).permute(1, 2, 0)
        assert (form.largest[0] >= torch.linalg.eigvalsh(c)[:, -1] * (1 - 1e-9)).all()
        exact_B = torch.linalg.eigvalsh(maps[at].mT @ c @ maps[at])[:, -1].clamp_min(0).sqrt()
        assert (rest.norm_B >= exact_B * (1 - 1e-9)).all()
        assert (rest.norm_B <= exact_B * 1.05 + 1e-12).all()
    assert formed


@pytest.mark.parametrize("parts", mostly_slow(PARTS, "stem"))
def test_columns_say_how_far_the_first_units_reach(parts: str) -> None:
    """The reach of the first units is exact up to rounding where functionals are the same for all images.

    It is never too small where noise adds as much as the image. The allowance for rounding costs at most 3 %.
    """
    _, analysis = analysis_of(parts)
    found = measured(analysis, 0.05)
    tape, e_B = found.tape, found.most_B
    first, of_columns = tape.nonlinear[0], Columns.of(tape, analysis.images)
    forms = tape.leaves[first].forms
    assert (of_columns is not None) == isinstance(forms, UnitForms)
    if forms is None or of_columns is None:
        return
    for ends in ({}, {leaves[-1]: e_B for leaves in tape.of_nodes if leaves[-1] < first}):
        told = of_columns.lengths(tape, e_B, ends)
        whole = Joint(tape, analysis.images, e_B, found.joint.weights, Noise(ends, {}))
        shown = dense(whole, first)[first].permute(2, 0, 1).unflatten(-1, entering(tape.leaves[first])[1:])
        exact = forms.squares(shown).sqrt()
        assert (told >= exact).all()
        if not ends:
            torch.testing.assert_close(told, exact, rtol=1e-8, atol=0)
            reach = found.rests[first].reach
            torch.testing.assert_close(reach, of_columns.lengths(tape, e_B, found.joint.noise.weights))
            assert reach is not None
            assert (exact <= reach).all()
            assert (reach <= 1.03 * exact).all()


def test_columns_count_what_is_rounded_of_rounding() -> None:
    """Two leaves that round 10^3 of a unit vector, with gains of 1: the bounds are 10^3 (1 + 10^3) and 10^3."""
    x = torch.zeros(2, 8, dtype=torch.float64)
    rough = replace(expansion_of(nn.Identity())(x), rounding_B=torch.full((2,), 1e3).double())
    units = expansion_of(nn.GELU())(x)
    tape = Tape([rough, rough, units])
    assert isinstance(units.forms, UnitForms)
    columns = Columns(max(tape.leaves), torch.zeros(1, 1, 8, dtype=torch.float64), 1)
    told = columns.lengths(tape, torch.ones(2).double(), {})
    assert (told >= 1e3 * (1 + 1e3) + 1e3).all()
    assert (told < 1.1e6).all()


@pytest.mark.parametrize("parts", mostly_slow(SMOOTH, "smooth"))
@pytest.mark.slow
def test_the_forms_of_margins_are_those_of_dense_maps(parts: str) -> None:
    _, analysis = analysis_of(parts)
    here = situation(analysis)
    found = measured(analysis, 0.05)
    class_CB = here.rivals_BR[:, :2].mT
    margins = found.margins(here.gradients(class_CB).leaves, class_CB)
    maps = dense(found.joint, margins.last)
    total = sum((matrix(found, form, at, maps) for at, form in margins.forms.items()), torch.zeros(()))
    exact = torch.linalg.eigvalsh(total)[..., -1].clamp_min(0).sqrt()
    assert (margins.norm >= exact * (1 - 1e-9)).all()
    assert (margins.norm <= exact * COARSE + 1e-12).all()


@pytest.mark.slow
def test_the_end_moves_no_further_than_is_said() -> None:
    """Test chains that are cut after every node, residual sums included."""
    certifier, analysis = analysis_of("standard", count=2)
    here, e_B = situation(analysis), torch.full((2,), 0.05, dtype=torch.float64)
    whole, cut = stage_of(analysis, 0.05).ellipsoids.joint, list[bool]()
    for count in range(1, len(certifier.nodes) + 1):
        tape = Tape(analysis.inner.chain.expansions[:count])
        if tape.nonlinear:
            weights, *of_noise = (
                {at: size for at, size in sizes.items() if at in tape.leaves}
                for sizes in (whole.weights, whole.noise.weights, whole.noise.lengths)
            )
            nonlinear = {at: weight for at, weight in weights.items() if at in tape.nonlinear}
            joint = Joint(tape, here.images, e_B, nonlinear, Noise(*of_noise))
            found = Ellipsoids(joint, here.draw, nothing, here.off, None)
            assert (farthest(certifier, here.images, count, e_B) <= found.end(found.at(e_B)) * (1 + 1e-9)).all()
            cut.append(tape.ends_in_sum)
    assert any(cut)
    assert not all(cut)


def farthest(certifier: Image, x: Tensor, count: int, e_B: Tensor) -> Tensor:
    """Return the largest change of the output that ascent finds for these nodes: (B,)."""

    def end(z: Tensor) -> Tensor:
        for layer, _ in certifier.nodes[:count]:
            z = layer(z)[0]
        return z.flatten(1)

    clean = end(x).detach()
    return ascend(lambda z: (end(z) - clean.repeat(len(z) // len(clean), 1)).norm(dim=1), x, e_B, 30, 3)


def test_chernoff_is_below_the_quantile() -> None:
    """Compare with the quantile of chi-square with M degrees of freedom from its series; it is close as well."""
    for count, chance in ((64, 1e-3), (256, 1e-12), (512, 1e-17)):
        x = least_square_sum(count, chance)
        below = math.exp(chi_square_log(count, x))
        assert below <= chance
        assert math.exp(chi_square_log(count, 1.3 * x)) > chance


def chi_square_log(count: int, x: float) -> float:
    """Return log P[chi^2 <= x] from the series x^(k/2) e^(-x/2) sum_n x^n / ... of the incomplete gamma function."""
    s, y = count / 2, x / 2
    term, total, n = 1 / s, 1 / s, s
    for _ in range(2000):
        n += 1
        term *= y / n
        total += term
    return s * math.log(y) - y + math.log(total) - math.lgamma(s)


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["smooth", "standard"])
def test_weights_are_in_proportion(parts: str) -> None:
    """Scaling the weights of any leaf by 3 either way barely improves the remainders' cost.

    The cost is that of the closest rival at the expected radius. A planted leaf with weights 10 times too large is
    detected.
    """
    _, analysis = analysis_of(parts)
    here = situation(analysis)
    joint = RadiusStage(here, analysis.expected_B, Columns.of(here.tape, here.images)).ellipsoids.joint
    class_CB = here.rivals_BR[:, :1].mT
    g = here.gradients(class_CB).leaves
    units = [at for at in joint.weights if isinstance(here.tape.leaves[at].forms, UnitForms)]

    def cost(weights: Sizes) -> Tensor:
        scaled = Joint(here.tape, here.images, joint.most_B, weights, joint.noise)
        found = Ellipsoids(scaled, here.draw, here.sizes, here.off, Columns.of(here.tape, here.images))
        return found.cost(found.margins(g, class_CB), found.at(found.most_B))[0]

    def saved(weights: Sizes) -> Tensor:
        """Return the factor by which another scale of one leaf improves the cost, on average."""
        others = [{**weights, at: factor * weights[at]} for at in units[:-1] for factor in (1 / 3, 3.0)]
        return (cost(weights) / torch.stack([cost(other) for other in others]).amin(0)).mean()

    assert saved(dict(joint.weights)) < 1.1
    assert saved({**joint.weights, units[-2]: 10 * joint.weights[units[-2]]}) > 1.1
