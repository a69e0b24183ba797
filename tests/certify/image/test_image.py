"""Bounds on the ball of images hold against ascent, and planted faults are detected."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from certify import certified_radius
from certify.adjoint.adjoint import Adjoint
from certify.api import radius_of
from certify.ellipsoids import budget, measured
from certify.ellipsoids.columns import Columns
from certify.ellipsoids.ellipsoid import Ellipsoids
from certify.ellipsoids.joint import Joint, Sizes
from certify.image.image import Image, ImageAnalysis
from certify.image.radius_stage import RadiusStage
from certify.image.situation import Situation
from certify.shared.ball import NORMS
from tests.tools.ascent import ascend, margin_loss
from tests.tools.cases import mostly_slow
from tests.tools.image_stages import SMOOTH, analysis_of, beaten, formed_losses, off_by, situation, stage_of
from tests.tools.small_models import PARTS, labelled, small_model
from zoo.attention.softmax.parts import CoreLeafForms
from zoo.bounds import lanczos
from zoo.bounds.activations import Smooth
from zoo.bounds.contracts import Activation, Expansion
from zoo.bounds.elementwise import UnitForms
from zoo.bounds.tape import Tape
from zoo.models.convnet import ConvNet

ROOT = Path(__file__).parents[3]
EPS = (0.2,)  # the test also tries smaller values
# "cls" and "fc_norm" behave like "standard".
BUT_FOR_THE_POOLING = mostly_slow(PARTS, "smooth", "lofast", "standard", "stem")


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize(("parts", "norm"), mostly_slow(product(PARTS, NORMS), ("smooth", "linf")))
def test_ascent_finds_no_image_that_loses_more(parts: str, norm: str, eps: float) -> None:
    """Attack the image method's own bound, without the adjoint's help, for every rival at the largest e and below."""
    certifier, analysis = analysis_of(parts, count=4, norm=norm)
    assert not beaten(certifier, analysis, stage_of(analysis, eps), (eps, 0.1 * eps))


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS)
def test_any_weights_are_sound(parts: str) -> None:
    """Weights change how tight a bound is, never its validity."""
    certifier, analysis = analysis_of(parts, count=4)
    stage = stage_of(analysis, 0.1)
    weights, random = stage.ellipsoids.joint.weights, torch.Generator().manual_seed(0)
    wild = {
        at: weight * torch.exp(2 * torch.randn(weight.shape, generator=random, dtype=weight.dtype))
        for at, weight in weights.items()
    }
    here = stage.here
    joint = Joint(here.tape, here.images, stage.most_B, wild, stage.ellipsoids.joint.noise)
    stage.ellipsoids = Ellipsoids(joint, here.draw, here.sizes, here.off, Columns.of(here.tape, here.images))
    assert not beaten(certifier, analysis, stage, (0.1,))


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS)
def test_what_is_off_between_nodes_is_part_of_the_ball(parts: str) -> None:
    """Nodes have ends that are off by a hundredth.

    Ascent over the image and these errors finds no margin that loses more than the bound. A planted bound that ignores
    the errors is beaten.
    """
    certifier, analysis = analysis_of(parts, count=3)
    e_B, off = torch.full((3,), 0.02, dtype=torch.float64), 0.01
    here, unaware = off_by(analysis, off), off_by(analysis, 0.0)
    rival_B = here.rivals_BR[:, 0]
    lost_B = fall(certifier, here, rival_B, e_B, off)
    for told, planted in ((here, False), (unaware, True)):
        stage = RadiusStage(told, e_B, Columns.of(told.tape, told.images))
        of_pairs_BJ = stage._of_pairs(stage._asked(e_B))
        assert planted or not (lost_B > of_pairs_BJ.gather(1, rival_B[:, None])[:, 0]).any()
        assert bool((lost_B > formed_losses(stage, e_B).gather(1, rival_B[:, None])[:, 0]).any()) == planted


def fall(certifier: Image, here: Situation, rival_B: Tensor, e_B: Tensor, off: float) -> Tensor:
    """Return the fall of the margin, by ascent over an image change of length e and a change of every node, `off`."""

    def lost_of(moves: Sequence[Tensor]) -> Tensor:
        logits = certifier.head(points_of(certifier, here, moves)[-1])
        return (logits.gather(1, rival_B[:, None]) - logits.gather(1, here.clean.label_B[:, None]))[:, 0]

    return ascended(lost_of, here, [e_B, *(torch.full_like(e_B, off) for _ in here.tape.of_nodes)])


def points_of(certifier: Image, here: Situation, moves: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs of all nodes and the features, with these changes of the image and of the ends of nodes."""
    points = [here.images + moves[0]]
    for (layer, _), move in zip(certifier.nodes, moves[1:], strict=True):
        points.append(layer(points[-1])[0] + move)
    return points


def ascended(value_of: Callable[[Sequence[Tensor]], Tensor], here: Situation, lengths: Sequence[Tensor]) -> Tensor:
    """Return how far a value grows, by ascent over changes of these lengths of the image and of the ends of nodes."""
    shapes = [here.images.shape, *(here.tape.leaves[leaves[-1]].y.shape for leaves in here.tape.of_nodes)]
    torch.manual_seed(0)
    moves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    for _ in range(40):
        on_sphere = [
            move * (length_B / move.flatten(1).norm(dim=1).clamp_min(1e-300)).view(-1, *(1,) * (move.ndim - 1))
            for move, length_B in zip(moves, lengths, strict=True)
        ]
        value_B = value_of(on_sphere)
        found = torch.autograd.grad(value_B.sum(), on_sphere, materialize_grads=True)
        moves = [gradient.detach() for gradient in found]  # a Frank-Wolfe step to the boundary of each ball
        moves = [move.requires_grad_() for move in moves]
    return (value_B - value_of([torch.zeros_like(move) for move in moves])).detach()


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS)
def test_no_input_moves_further_than_where_the_error_behind_it_is_taken(parts: str) -> None:
    """Errors grow with the radius, as those of served attention do, so that ||M_i|| is measured for them."""
    certifier, analysis = analysis_of(parts, count=2)
    radii, e_B = dict[int, Tensor](), torch.full((2,), 0.02, dtype=torch.float64)

    def off(node: int, r_B: Tensor) -> Tensor:
        radii[node] = r_B
        return 0.01 * r_B

    here = replace(off_by(analysis, 0.0), off=off)
    ellipsoids = RadiusStage(here, e_B, Columns.of(here.tape, here.images)).ellipsoids
    clean = points_of(certifier, here, [torch.zeros(())] * (1 + len(here.tape.of_nodes)))
    for share in (1.0, 0.3):
        ellipsoids.at(share * e_B)
        lengths = [share * e_B, *(0.01 * radii[node] for node in sorted(radii))]
        for node, radius_B in sorted(radii.items()):

            def moved_of(moves: Sequence[Tensor], node: int = node) -> Tensor:
                return (points_of(certifier, here, moves)[node] - clean[node] + 1e-30).flatten(1).norm(dim=1)

            assert (ascended(moved_of, here, lengths) <= radius_B).all()
    assert any(bool(norm_B.isfinite().all()) for norm_B in ellipsoids._inputs.values())


@pytest.mark.parametrize("parts", mostly_slow(PARTS, "lofast"))
@pytest.mark.slow
def test_large_models_are_left_to_forms(parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat a small model as a large one: measure no layer, and tell rivals apart by their features.

    All images have a radius, and no ascent finds more.
    """
    monkeypatch.setattr(budget, "LARGE", 1)
    certifier, analysis = analysis_of(parts)
    radius_B = radius_of(analysis)
    assert "norms" not in vars(analysis.inner)
    assert (radius_B > 1e-4).all()
    level, stage = analysis.levels[0], analysis.levels[0].stage
    assert len(level.index_I) == len(radius_B)
    assert not beaten(certifier, analysis, stage, (float(radius_B.min()),))


@pytest.mark.parametrize("parts", mostly_slow(SMOOTH, "smooth"))
def test_remainders_of_units_stay_below_their_forms(parts: str) -> None:
    """Bound -<g, R> and |r| for random changes of a leaf's input, as large as its units reach."""
    _, analysis = analysis_of(parts)
    found = stage_of(analysis, 0.3).ellipsoids
    for at, rest in found.rests.items():
        forms, reach = found.tape.leaves[at].forms, rest.reach
        if not isinstance(forms, UnitForms) or not isinstance(forms.activation, Smooth) or reach is None:
            continue
        act, z = forms.activation, forms.z_BNH
        d = reach * (2 * torch.rand(64, *z.shape, dtype=torch.float64) - 1)
        w = torch.randn_like(z)
        exact = act_value(act, z, d)
        assert (-w * exact <= act.parabola(z, w, reach)[0] * d.square() / 2 + 1e-9).all()
        assert (exact.abs() <= act.chord(z, reach) * d.abs() + 1e-9).all()


def act_value(act: Activation, z: Tensor, d: Tensor) -> Tensor:
    """Return sigma(z + d) - sigma(z) - sigma'(z) d, by quadrature of sigma'."""
    nodes = torch.linspace(0, 1, 201, dtype=torch.float64).view(-1, *(1,) * d.ndim)
    slopes = act.slope(z + nodes * d) - act.slope(z)
    return torch.trapezoid(slopes, dx=1 / 200, dim=0) * d


@pytest.mark.slow  # in the gate at one radius: test_ball.py; ascent at one radius: the tests above
@pytest.mark.parametrize("parts", ["smooth", "lofast", "standard", "cls", "fc_norm"])
def test_radii_are_never_below_the_adjoint_ones_and_ascent_beats_none(parts: str) -> None:
    model = small_model(parts, 1)
    x, y = labelled(model, 4, 2)
    adjoint_B, image_B = (certified_radius(model, x, y, method=method) for method in ("adjoint", "image"))
    assert (image_B >= adjoint_B * (1 - 2**-8)).all()
    baked = Adjoint(model).baked
    found_B = ascend(margin_loss(baked, y), x.double(), image_B, steps=40, starts=4)
    assert not ((found_B > 0) & (image_B > 0)).any()


@pytest.mark.slow
@pytest.mark.parametrize("theta", [None, 1.0])
def test_kinks_cost_less_on_the_ball_of_images(theta: float | None) -> None:
    """A network of ReLU or ReLU_theta gets larger radii with forms of its remainders, and is never beaten."""
    torch.manual_seed(1)
    model = conv_net(theta)
    x, y = labelled(model, 8, 2)
    adjoint_B, image_B = (certified_radius(model, x, y, method=method, nonce="one") for method in ("adjoint", "image"))
    assert (image_B >= adjoint_B * (1 - 2**-8)).all()
    assert (image_B / adjoint_B).quantile(0.75) > 1.05
    found_B = ascend(margin_loss(Adjoint(model).baked, y), x.double(), image_B, steps=60, starts=6)
    assert not (found_B > 0).any()


def conv_net(theta: float | None) -> ConvNet:
    sizes: dict[str, Any] = {"img_size": 8, "in_chans": 1, "num_classes": 4, "hidden": [32, 32]}
    layers = [(8, 3, 1, 1), (8, 3, 2, 1)]
    return ConvNet(layers=layers, theta=theta, mean=(0.5,), std=(0.5,), **sizes).eval()


@pytest.mark.slow
def test_forms_of_attention_leave_a_fraction_of_its_remainder() -> None:
    """Compare content attention of large scores with every attention as one leaf without forms."""
    _, analysis = analysis_of("standard", 1, count=2)
    e_B = torch.full((2,), 0.002, dtype=torch.float64)
    with_forms, here = stage_of(analysis, 0.002), situation(analysis)
    chain = analysis.inner.chain.expansions
    plain = RadiusStage(replace(here, tape=Tape([in_one_piece(expansion) for expansion in chain])), e_B, None)
    class_CB = here.rivals_BR[:, :1].mT
    costs = [
        stage.ellipsoids.cost(stage._formed_of(class_CB).margins, stage.ellipsoids.at(e_B))
        for stage in (with_forms, plain)
    ]
    assert (costs[0] < 0.25 * costs[1]).all()


def in_one_piece(expansion: Expansion) -> Expansion:
    """Put attention, which ends in three leaves with a core as the second, into one leaf."""
    if any(isinstance(part.forms, CoreLeafForms) for part in expansion.parts):
        return replace(expansion, parts=())
    branches = tuple(tuple(in_one_piece(part) for part in branch) for branch in expansion.branches)
    return replace(expansion, parts=tuple(in_one_piece(part) for part in expansion.parts), branches=branches)


def smooth_images(count: int) -> Tensor:
    x = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(x, 32, mode="bicubic").clamp(0, 1)


@pytest.mark.slow
def test_ascent_reaches_most_of_what_the_committed_model_can_lose() -> None:
    """Ascent reaches 60 % of the closest rival's loss at 36/255.

    The part beyond first order is a fraction of the adjoint's.
    """
    model, _ = zoo.handover.load(ROOT / "zoo" / "weights" / "cert_vit_c10")
    x = smooth_images(2)
    y = model(x).argmax(1)
    certifier = Image(model, nonce="one")
    ((_, analysis),) = certifier.analyse(x, y).parts
    assert isinstance(analysis, ImageAnalysis)
    stage, inner = stage_of(analysis, 36 / 255), analysis.inner
    rival_B = analysis.clean.margin_BJ.argmin(1)
    loss_B = formed_losses(stage, stage.most_B).gather(1, rival_B[:, None])[:, 0]
    first_B = stage.here.first(rival_B[None])[0] * stage.most_B
    by_adjoint_B = inner.rivals(0, 1).tight(inner.radii(stage.most_B), torch.ones(1, 2, dtype=torch.bool))[0]
    assert (loss_B - first_B < 0.2 * (by_adjoint_B - first_B)).all()

    def drop(z: Tensor) -> Tensor:
        logits, many = certifier.baked(z), len(z) // 2
        own, other = y.repeat(many)[:, None], rival_B.repeat(many)[:, None]
        return (logits.gather(1, other) - logits.gather(1, own))[:, 0]

    found_B = ascend(drop, analysis.images, stage.most_B, steps=20, starts=1) - drop(analysis.images)
    assert (found_B <= loss_B).all()
    assert (found_B >= 0.6 * loss_B).all()


def one_step(gram: lanczos.Map, start: Tensor, rounding: Tensor, close: float = lanczos.CLOSE) -> Tensor:
    """Replace norms by the estimate of a single step."""
    maps, count, images = start.shape[:3]

    def apply(v_LN: Tensor) -> Tensor:
        return gram(v_LN.view(maps * count, images, *start.shape[3:])).flatten(2).flatten(0, 1)

    return lanczos.ritz(apply, start.flatten(3).flatten(0, 2), 1).sqrt().view(maps, count, images).amax(1)


LENGTHS = "lengths that are too short"
FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "theta forgotten": lambda patch: patch.setattr(Ellipsoids, "_theta", lambda self, at, known: 0 * known.total_B),
    "forms at the clean point": lambda patch: patch.setattr(
        Smooth, "chord", lambda self, z, reach: 0.01 * self.second(z).abs() * reach
    ),
    "an estimate for a bound": lambda patch: patch.setattr(lanczos, "norms", one_step),
    LENGTHS: lambda patch: patch.setattr(Situation, "sizes", short(Situation.sizes)),
    "probes that reach too short": lambda patch: patch.setattr(measured, "least_square_sum", lambda *_: 100 * 1536.0),
}


def short(sizes: Callable[[Situation, Tensor], Sizes]) -> Callable[[Situation, Tensor], Sizes]:
    return lambda here, e_B: {at: 0.1 * size_B for at, size_B in sizes(here, e_B).items()}


@pytest.mark.parametrize("parts", mostly_slow(("standard", "smooth"), "smooth"))
def test_remainders_stay_within_theta(parts: str) -> None:
    assert not exceeded(parts)


@pytest.mark.parametrize("fault", mostly_slow(FAULTS, LENGTHS))
def test_a_planted_fault_is_seen_by_ascent(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert exceeded("smooth" if fault == LENGTHS else "standard")  # hidden units that come first in their node


def exceeded(parts: str) -> bool:
    """Check if an image moves the units of a block beyond their reach, or off their linear part by more than theta."""
    certifier, analysis = analysis_of(parts, seed=0)
    stage = stage_of(analysis, 0.02)
    grown, tape = stage.ellipsoids.at(stage.most_B), stage.here.tape
    units = [at for at in tape.nonlinear if isinstance(tape.leaves[at].forms, UnitForms)]
    beyond = []
    for block, at in enumerate(units):
        forms, point = tape.leaves[at].forms, input_of(block, certifier)
        assert isinstance(forms, UnitForms)
        clean, reach = point(analysis.images), stage.ellipsoids.rests[at].reach

        def far(
            z: Tensor, forms: UnitForms = forms, point: Any = point, clean: Tensor = clean, reach: Any = reach
        ) -> Tensor:
            many = len(z) // len(clean)
            d = forms.units((point(z) - clean.repeat(many, 1, 1)).view(many, *clean.shape))
            return (d.abs() / reach).flatten(2).amax(-1).flatten()

        def share(
            z: Tensor, at: int = at, forms: UnitForms = forms, point: Any = point, clean: Tensor = clean
        ) -> Tensor:
            many = len(z) // len(clean)
            d = forms.units((point(z) - clean.repeat(many, 1, 1)).view(many, *clean.shape))
            r = act_value(forms.activation, forms.z_BNH, d) / stage.ellipsoids.joint.weights[at]
            return r.flatten(2).square().sum(-1).flatten()

        found_B = ascend(share, analysis.images, stage.most_B, steps=40, starts=4)
        beyond.append(bool((found_B > grown.theta[at] * (1 + 1e-6)).any()))
        beyond.append(bool((ascend(far, analysis.images, stage.most_B, steps=40, starts=4) > 1 + 1e-6).any()))
    return any(beyond)


def input_of(number: int, certifier: Image) -> Callable[[Tensor], Tensor]:
    """Return the map from x to the input of the hidden units of a block."""
    block: Any = certifier.baked.get_submodule(f"blocks.{number}")

    def point(x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        hook = block.mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            certifier.baked(x)
        finally:
            hook.remove()
        return seen[0]

    return point


@pytest.mark.slow
def test_the_nonce_chooses_the_starts_and_the_batch_does_not() -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 6, 2)
    whole = Image(model, nonce="one").analyse(x, y).at(0.1)
    alone = [Image(model, nonce="one").analyse(x[i : i + 1], y[i : i + 1]).at(0.1) for i in range(6)]
    torch.testing.assert_close(whole.loss_B, torch.cat([one.loss_B for one in alone]), rtol=1e-6, atol=1e-9)
    other = Image(model, nonce="two").analyse(x, y).at(0.1)
    torch.testing.assert_close(whole.loss_B, other.loss_B, rtol=0.1, atol=1e-6)


@pytest.mark.slow
def test_an_answer_does_not_hang_on_what_was_asked_before() -> None:
    _, one = analysis_of("standard", count=6)
    _, other = analysis_of("standard", count=6)
    radius_B = radius_of(one)
    for eps in (0.3, 0.001, 0.1):
        one.at(eps)
        one.in_search(eps)
    for share in (0.9, 1.0, 1.1):
        for answer in (type(one).at, type(one).in_search):
            mine, its = (answer(analysis, share * radius_B).loss_B for analysis in (one, other))
            torch.testing.assert_close(mine, its)


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_a_single_eps_is_proved_where_a_search_proves_it(norm: str) -> None:
    """A stage for one eps is the tightest there is: its radii are those of the search, or larger."""
    _, analysis = analysis_of("standard", norm=norm)
    radius_B = radius_of(analysis)
    assert (radius_B > 1.02 * radius_of(analysis.inner)).any(), "the stages prove nothing here"
    assert analysis.at(0.99 * radius_B).certified_B.all()


@pytest.mark.parametrize("nothing", mostly_slow((math.nan, 0.0), math.nan))
@pytest.mark.slow
def test_an_image_of_which_nothing_is_expected_disturbs_no_other(nothing: float) -> None:
    """An image with an expected radius of 0 has no stage, which would divide by it."""
    _, whole = analysis_of("standard")
    _, one = analysis_of("standard")
    vars(one)["expected_B"] = whole.expected_B.index_fill(0, torch.tensor(1), nothing)
    radius_B, rest = radius_of(one), torch.tensor([0, 2])
    torch.testing.assert_close(radius_B[rest], radius_of(whole)[rest])
    assert one.levels
    assert all(1 not in level.index_I for level in one.levels)
    assert radius_B[1] == pytest.approx(float(radius_of(whole.inner)[1]), rel=2e-3), "what the search tells apart"


@pytest.mark.slow
def test_the_chance_is_counted() -> None:
    _, analysis = analysis_of("standard")
    assert analysis.failure == analysis.inner.failure == 0
    analysis.at(1.02 * radius_of(analysis.inner))
    alone = analysis.failure
    assert analysis.inner.failure + measured.PROBE_FAILURE + 4 * lanczos.FAILURE < alone < 1e-6
    analysis.in_search(1.02 * radius_of(analysis.inner))
    assert analysis.failure > alone + measured.PROBE_FAILURE + 4 * lanczos.FAILURE
    assert analysis.levels
    assert max(level.stage.ellipsoids.failure for level in analysis.levels) <= analysis.failure < 1e-6


@pytest.mark.parametrize("eps", [0.0, 1e-9, 1e9])
def test_extreme_radii_have_an_answer(eps: float) -> None:
    _, analysis = analysis_of("standard")
    certificate = analysis.at(eps)
    assert certificate.certified_B.all() == (eps < 1)
    assert not certificate.loss_B.isnan().any()
