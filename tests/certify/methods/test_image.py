"""Forms on the ball of images: every quantity against what ascent finds, and against dense Jacobians."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from certify import certified_radius
from certify.api import radius_of
from certify.maps import effort, ellipsoid
from certify.maps.ellipsoid import Ellipsoids, Joint, Noise, least_square_sum
from certify.methods.adjoint import Adjoint
from certify.methods.ball import NORMS
from certify.methods.image import Image, ImageAnalysis
from certify.methods.rung import Rung, Situation
from tests.certify.methods.test_certify import margin_loss
from tests.tools.ascent import ascend, ascend_box
from tests.tools.small_models import PARTS, labelled, small_model
from zoo.attention.parts import CoreLeafForms
from zoo.bounds import lanczos
from zoo.bounds.activations import Smooth
from zoo.bounds.contracts import Activation, Expansion
from zoo.bounds.elementwise import UnitForms
from zoo.bounds.tape import Tape, Vectors
from zoo.models.convnet import ConvNet

ROOT = Path(__file__).parents[3]
EPS = (0.2,)  # and below
CLOSE = 1.03
SMOOTH = ("standard", "smooth", "cls")  # parts with hidden units that have forms


def analysis_of(parts: str, seed: int = 0, count: int = 3, norm: str = "l2") -> tuple[Image, ImageAnalysis]:
    model = small_model(parts, seed)
    certifier = Image(model, nonce="a nonce", norm=norm)
    ((_, found),) = certifier.analyse(*labelled(model, count, 1)).parts
    assert isinstance(found, ImageAnalysis)
    return certifier, found


def situation(analysis: ImageAnalysis) -> Situation:
    count = len(analysis.images)
    return Situation.of(analysis.inner, analysis.images, torch.arange(count), b"a seed", torch.zeros(count).double())


def rung_of(analysis: ImageAnalysis, e: float) -> Rung:
    here = situation(analysis)
    return Rung(here, torch.full_like(here.images[:, 0, 0, 0], e))


def dense(joint: Joint, last: int) -> Vectors:
    """M_i (B, x, n) of every leaf up to the last, by pushing every unit vector."""
    room, found = joint.room(last), Vectors()
    eye = torch.eye(room, dtype=torch.float64)[:, None].expand(-1, len(joint.most_B), -1)
    joint.push(eye, lambda at, v: found.update({at: v.flatten(2).permute(1, 2, 0)}), last)
    n = {at: joint.room(at) for at in found}
    return {at: m[..., : n[at]] for at, m in found.items()}


@pytest.mark.parametrize("parts", PARTS)
def test_the_tape_is_the_model(parts: str) -> None:
    """What arrives at the image is the gradient by autograd, and pushing is the transpose of pulling."""
    certifier, analysis = analysis_of(parts)
    here = situation(analysis)
    x = analysis.images.clone().requires_grad_()
    logits = certifier.baked(x)
    label_B = analysis.clean.label_B
    rival_B = (label_B + 1) % logits.shape[1]
    margin_B = logits.gather(1, label_B[:, None]) - logits.gather(1, rival_B[:, None])
    (wanted,) = torch.autograd.grad(margin_B.sum(), x)
    found, _ = here.gradients(rival_B[None])
    torch.testing.assert_close(found[0], wanted)
    joint = rung_of(analysis, 0.1).ellipsoids.joint
    last = max(here.tape.leaves)
    u = torch.randn(2, len(x), joint.room(last), dtype=torch.float64)
    seen = Vectors()
    joint.push(u, lambda at, v: seen.update({at: v}), last)
    g = {at: torch.randn_like(v) for at, v in seen.items()}
    pushed = sum(float((seen[at] * g[at]).sum()) for at in seen)
    assert pushed == pytest.approx(float((u * joint.pull(g, last)).sum()), rel=1e-9)


@pytest.mark.parametrize("parts", SMOOTH)
def test_reaches_and_seminorms_are_those_of_dense_maps(parts: str) -> None:
    """Never below, and as close as each promises."""
    _, analysis = analysis_of(parts)
    found = rung_of(analysis, 0.05).ellipsoids
    maps, grown = dense(found.joint, found.tape.bent[-1]), found.at(found.most_B)
    formed = 0
    for at, rest in found.rests.items():
        forms, root_B = found.tape.leaves[at].forms, grown.before[at].sqrt()
        if forms is None:
            share_B = rest.norm_B / torch.linalg.matrix_norm(maps[at], 2)
            assert (share_B >= 1 - 1e-9).all()
            assert (share_B < 1.21).all()
            continue
        formed += 1
        room = situation(analysis).tape.leaves[at].pull(found.tape.leaves[at].y[None])[0].shape
        columns = maps[at].permute(2, 0, 1).unflatten(-1, room[1:])
        assert rest.reach is not None
        exact = forms.squares(columns).sqrt() * root_B.view(-1, *(1,) * (rest.reach.ndim - 1))
        finite = torch.isfinite(exact)
        assert (rest.reach >= exact - 1e-9)[finite].all()
        if isinstance(forms, UnitForms):
            assert (rest.reach <= 1.5 * exact + 1e-9).all()
        form = forms.of_rest(rest.reach, 1 / found.joint.weights[at])
        eye = torch.eye(room[1:].numel(), dtype=torch.float64).view(-1, 1, *room[1:]).expand(-1, *room)
        c = form.apply(eye).flatten(2).permute(1, 2, 0)
        assert (form.largest[0] >= torch.linalg.eigvalsh(c)[:, -1] * (1 - 1e-9)).all()
        exact_B = torch.linalg.eigvalsh(maps[at].mT @ c @ maps[at])[:, -1].clamp_min(0).sqrt()
        assert (rest.norm_B >= exact_B * (1 - 1e-9)).all()
        assert (rest.norm_B <= exact_B * 1.05 + 1e-12).all()
    assert formed


@pytest.mark.parametrize("parts", SMOOTH)
def test_the_forms_of_margins_are_those_of_dense_maps(parts: str) -> None:
    _, analysis = analysis_of(parts)
    here = situation(analysis)
    found = rung_of(analysis, 0.05).ellipsoids
    class_CB = here.rivals_BR[:, :2].mT
    _, g = here.gradients(class_CB)
    margins = found.margins(g, class_CB, CLOSE)
    maps, total = dense(found.joint, margins.last), torch.zeros(())
    for at in found.tape.bent:
        forms, reach = found.tape.leaves[at].forms, found.rests[at].reach
        if forms is None or reach is None:
            continue
        form = forms.of_gradient(g[at], reach)
        m = maps[at]
        columns = m.permute(2, 0, 1).unflatten(
            -1, found.tape.leaves[at].pull(found.tape.leaves[at].y[None])[0].shape[1:]
        )
        pulled = torch.stack([form.apply(column.expand(2, *column.shape)) for column in columns])  # (n, C, B, *x)
        part = torch.einsum("ncbx,bxk->cbnk", pulled.flatten(3), m)
        total = torch.nn.functional.pad(part, (0, maps[margins.last].shape[-1] - m.shape[-1]) * 2) + total
    exact = torch.linalg.eigvalsh(total)[..., -1].clamp_min(0).sqrt()
    assert (margins.norm >= exact * (1 - 1e-9)).all()
    assert (margins.norm <= exact * 1.05 + 1e-12).all()


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("parts", PARTS)
def test_ascent_finds_no_image_that_loses_more(parts: str, norm: str, eps: float) -> None:
    """Of the image's own bound, without the adjoint's help: for every rival, at the largest e and below."""
    certifier, analysis = analysis_of(parts, count=4, norm=norm)
    assert not beaten(certifier, analysis, rung_of(analysis, eps), (eps, 0.1 * eps))


@pytest.mark.parametrize("parts", PARTS)
def test_any_weights_are_sound(parts: str) -> None:
    """They choose how tight a bound is, not whether it is one."""
    certifier, analysis = analysis_of(parts, count=4)
    rung = rung_of(analysis, 0.1)
    weights, random = rung.ellipsoids.joint.weights, torch.Generator().manual_seed(0)
    wild = {
        at: weight * torch.exp(2 * torch.randn(weight.shape, generator=random, dtype=weight.dtype))
        for at, weight in weights.items()
    }
    here = rung.here
    rung.ellipsoids = Ellipsoids(
        Joint(here.tape, here.images, rung.most_B, wild, rung.ellipsoids.joint.noise), here.draw
    )
    assert not beaten(certifier, analysis, rung, (0.1,))


@pytest.mark.parametrize("parts", PARTS)
def test_what_is_off_between_nodes_is_part_of_the_ball(parts: str) -> None:
    """Nodes whose ends are off by a hundredth: ascent over the image and all of that finds no margin that loses more.
    Without it in the ball, planted, it does."""
    certifier, analysis = analysis_of(parts, count=3)
    e_B, off = torch.full((3,), 0.02, dtype=torch.float64), 0.01
    here = replace(situation(analysis), defects=[torch.full_like(e_B, off) for _ in analysis.inner.steps])
    rival_B = here.rivals_BR[:, 0]
    lost_B = fall(certifier, here, rival_B, e_B, off)
    for told, planted in ((here, False), (replace(here, defects=situation(analysis).defects), True)):
        rung = Rung(told, e_B)
        of_pairs_BJ = rung._of_pairs(rung.ellipsoids.at(e_B))
        assert planted or not (lost_B > of_pairs_BJ.gather(1, rival_B[:, None])[:, 0]).any()
        assert bool((lost_B > formed_losses(rung, e_B).gather(1, rival_B[:, None])[:, 0]).any()) == planted


def fall(certifier: Image, here: Situation, rival_B: Tensor, e_B: Tensor, off: float) -> Tensor:
    """Of the margin, by ascent over a change of the image, of length e, and one of every node, `off`."""
    shapes = [here.images.shape, *(here.tape.leaves[leaves[-1]].y.shape for leaves in here.tape.of_nodes)]
    lengths = [e_B, *(torch.full_like(e_B, off) for _ in shapes[1:])]
    torch.manual_seed(0)
    moves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def margin_of(moves: Sequence[Tensor]) -> Tensor:
        x = here.images + moves[0]
        for (layer, _), move in zip(certifier.nodes, moves[1:], strict=True):
            x = layer(x)[0] + move
        logits = certifier.head(x)
        return (logits.gather(1, here.clean.label_B[:, None]) - logits.gather(1, rival_B[:, None]))[:, 0]

    for _ in range(40):
        on_sphere = [
            move * (length_B / move.flatten(1).norm(dim=1)).view(-1, *(1,) * (move.ndim - 1))
            for move, length_B in zip(moves, lengths, strict=True)
        ]
        moved_B = margin_of(on_sphere)
        found = torch.autograd.grad(moved_B.sum(), on_sphere)
        moves = [-gradient.detach() for gradient in found]  # a Frank-Wolfe step: the ends of balls
        moves = [move.requires_grad_() for move in moves]
    return (margin_of([torch.zeros_like(move) for move in moves]) - moved_B).detach()


@pytest.mark.parametrize("parts", PARTS)
def test_large_models_are_left_to_forms(parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is small is taken for large: no layer is measured, rivals are told apart by how far the features move. All
    images have a radius, and no ascent finds more."""
    monkeypatch.setattr(effort, "LARGE", 1)
    certifier, analysis = analysis_of(parts)
    radius_B = radius_of(analysis)
    assert "norms" not in vars(analysis.inner)
    assert (radius_B > 1e-4).all()
    (level, *_) = [rungs for rungs in analysis.rungs if rungs]
    for index_I, rung in level:
        assert len(index_I) == len(radius_B)
        assert not beaten(certifier, analysis, rung, (float(radius_B.min()),))


def test_the_end_moves_no_further_than_is_said() -> None:
    """Of chains that are cut behind every node, residual sums too."""
    certifier, analysis = analysis_of("standard", count=2)
    here, e_B = situation(analysis), torch.full((2,), 0.05, dtype=torch.float64)
    weights, cut = rung_of(analysis, 0.05).ellipsoids.joint.weights, list[bool]()
    for count in range(1, len(certifier.nodes) + 1):
        tape = Tape(analysis.inner.chain.expansions[:count])
        if tape.bent:
            of_tape = {at: weight for at, weight in weights.items() if at in tape.bent}
            joint = Joint(tape, here.images, e_B, of_tape, Noise({}, torch.zeros_like(e_B)))
            found = Ellipsoids(joint, here.draw)
            assert (farthest(certifier, here.images, count, e_B) <= found.end(found.at(e_B)) * (1 + 1e-9)).all()
            cut.append(tape.ends_in_sum)
    assert any(cut)
    assert not all(cut)


def farthest(certifier: Image, x: Tensor, count: int, e_B: Tensor) -> Tensor:
    """How far ascent moves what so many nodes answer: (B,)."""

    def end(z: Tensor) -> Tensor:
        for layer, _ in certifier.nodes[:count]:
            z = layer(z)[0]
        return z.flatten(1)

    clean = end(x).detach()
    return ascend(lambda z: (end(z) - clean.repeat(len(z) // len(clean), 1)).norm(dim=1), x, e_B, 30, 3)


def beaten(certifier: Image, analysis: ImageAnalysis, rung: Rung, radii: tuple[float, ...]) -> bool:
    """Does an image of one of the balls inside these L2 balls lose more of a margin than the rung says?"""
    label_B, ball = analysis.clean.label_B, analysis.ball
    search = ascend if ball.norm == "l2" else ascend_box
    for e in radii:
        e_B = rung.most_B / rung.most_B * e
        loss_BJ = rung.losses(e_B, torch.full_like(analysis.clean.margin_BJ, torch.inf))
        bounds_BJ = formed_losses(rung, e_B)
        for step in (1, 2, 3):
            rival_B = (label_B + step) % 4

            def drop(z: Tensor, rival_B: Tensor = rival_B) -> Tensor:
                logits = certifier.baked(z)
                many = len(z) // len(label_B)
                own, other = label_B.repeat(many)[:, None], rival_B.repeat(many)[:, None]
                return (logits.gather(1, other) - logits.gather(1, own))[:, 0]

            found_B = search(drop, analysis.images, ball.eps_within(e_B), 60, 4) - drop(analysis.images)
            assert (found_B > 0).all()
            for bound_BJ in (loss_BJ, bounds_BJ):
                if bool((found_B > bound_BJ.gather(1, rival_B[:, None])[:, 0] * (1 + 1e-9)).any()):
                    return True
    return False


def formed_losses(rung: Rung, e_B: Tensor) -> Tensor:
    """By the forms of every rival, also of those that a decision does not need."""
    class_CB = rung.here.rivals_BR.mT
    formed = rung._formed_of(class_CB, CLOSE)
    loss_BJ = torch.full_like(rung.here.clean.margin_BJ, torch.inf)
    rung._lower(loss_BJ, formed, e_B, rung.ellipsoids.at(e_B))
    return loss_BJ


@pytest.mark.parametrize("parts", SMOOTH)
def test_remainders_of_units_stay_below_their_forms(parts: str) -> None:
    """At random changes of a leaf's input, of the size that its units reach: -<g, R> and |r|."""
    _, analysis = analysis_of(parts)
    found = rung_of(analysis, 0.3).ellipsoids
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
    """sigma(z + d) - sigma(z) - sigma'(z) d, by quadrature of sigma'."""
    nodes = torch.linspace(0, 1, 201, dtype=torch.float64).view(-1, *(1,) * d.ndim)
    slopes = act.slope(z + nodes * d) - act.slope(z)
    return torch.trapezoid(slopes, dx=1 / 200, dim=0) * d


@pytest.mark.parametrize("parts", PARTS)
def test_radii_are_never_below_the_adjoint_ones_and_ascent_beats_none(parts: str) -> None:
    model = small_model(parts, 1)
    x, y = labelled(model, 4, 2)
    adjoint_B, image_B = (certified_radius(model, x, y, method=method) for method in ("adjoint", "image"))
    assert (image_B >= adjoint_B * (1 - 2**-8)).all()
    baked = Adjoint(model).baked
    found_B = ascend(margin_loss(baked, y), x.double(), image_B, steps=40, starts=4)
    assert not ((found_B > 0) & (image_B > 0)).any()


@pytest.mark.parametrize("theta", [None, 1.0])
def test_kinks_cost_less_on_the_ball_of_images(theta: float | None) -> None:
    """A conv net of ReLU or ReLU_theta, whose remainders had no forms once: certified further, and never beaten."""
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


def test_forms_of_attention_leave_a_fraction_of_its_remainder() -> None:
    """Content attention of large scores: against the same with every attention as one leaf without forms."""
    _, analysis = analysis_of("standard", 1, count=2)
    e_B = torch.full((2,), 0.002, dtype=torch.float64)
    with_forms, here = rung_of(analysis, 0.002), situation(analysis)
    chain = analysis.inner.chain.expansions
    plain = Rung(replace(here, tape=Tape([in_one_piece(expansion) for expansion in chain])), e_B)
    class_CB = here.rivals_BR[:, :1].mT
    costs = [
        rung.ellipsoids.cost(rung._formed_of(class_CB, CLOSE).margins, rung.ellipsoids.at(e_B))
        for rung in (with_forms, plain)
    ]
    assert (costs[0] < 0.25 * costs[1]).all()


def in_one_piece(expansion: Expansion) -> Expansion:
    """Attention, which ends in three leaves of which the second is a core, in one piece."""
    if any(isinstance(part.forms, CoreLeafForms) for part in expansion.parts):
        return replace(expansion, parts=())
    return replace(expansion, parts=tuple(in_one_piece(part) for part in expansion.parts))


def smooth_images(count: int) -> Tensor:
    x = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(x, 32, mode="bicubic").clamp(0, 1)


def test_ascent_reaches_most_of_what_the_committed_model_can_lose() -> None:
    """Of the closest rival at 36/255, at least 60 %; and what is not first order is a fraction of the adjoint's."""
    model, _ = zoo.handover.load(ROOT / "benchmarks" / "results" / "cert_vit_c10")
    x = smooth_images(2)
    y = model(x).argmax(1)
    certifier = Image(model, nonce="one")
    ((_, analysis),) = certifier.analyse(x, y).parts
    assert isinstance(analysis, ImageAnalysis)
    rung, inner = rung_of(analysis, 36 / 255), analysis.inner
    rival_B = analysis.clean.margin_BJ.argmin(1)
    loss_B = formed_losses(rung, rung.most_B).gather(1, rival_B[:, None])[:, 0]
    first_B = rung.here.first(rival_B[None])[0] * rung.most_B
    by_adjoint_B = inner.rivals(0, 1).tight(inner.radii(rung.most_B), torch.ones(1, 2, dtype=torch.bool))[0]
    assert (loss_B - first_B < 0.2 * (by_adjoint_B - first_B)).all()

    def drop(z: Tensor) -> Tensor:
        logits, many = certifier.baked(z), len(z) // 2
        own, other = y.repeat(many)[:, None], rival_B.repeat(many)[:, None]
        return (logits.gather(1, other) - logits.gather(1, own))[:, 0]

    found_B = ascend(drop, analysis.images, rung.most_B, steps=20, starts=1) - drop(analysis.images)
    assert (found_B <= loss_B).all()
    assert (found_B >= 0.6 * loss_B).all()


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "theta forgotten": lambda patch: patch.setattr(Ellipsoids, "_theta", lambda self, at, total_B: 0 * total_B),
    "forms at the clean point": lambda patch: patch.setattr(
        Smooth, "chord", lambda self, z, reach: 0.01 * self.second(z).abs() * reach
    ),
    "an estimate for a bound": lambda patch: patch.setattr(
        lanczos, "norms", lambda gram, start, close: lanczos.ritz(lambda u: gram(u[None])[0], start[0], 1)[None].sqrt()
    ),
    "probes that reach too short": lambda patch: patch.setattr(ellipsoid, "least_square_sum", lambda *_: 100 * 1536.0),
}


def test_remainders_stay_within_theta() -> None:
    assert not exceeded()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen_by_ascent(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert exceeded()


def exceeded() -> bool:
    """Does an image make the units of a block leave their linear part by more than theta says, or go beyond their
    reach?"""
    certifier, analysis = analysis_of("standard", seed=0)
    rung = rung_of(analysis, 0.02)
    grown, tape = rung.ellipsoids.at(rung.most_B), rung.here.tape
    units = [at for at in tape.bent if isinstance(tape.leaves[at].forms, UnitForms)]
    beyond = []
    for block, at in enumerate(units):
        forms, point = tape.leaves[at].forms, input_of(block, certifier)
        assert isinstance(forms, UnitForms)
        clean, reach = point(analysis.images), rung.ellipsoids.rests[at].reach

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
            r = act_value(forms.activation, forms.z_BNH, d) / rung.ellipsoids.joint.weights[at]
            return r.flatten(2).square().sum(-1).flatten()

        found_B = ascend(share, analysis.images, rung.most_B, steps=40, starts=4)
        beyond.append(bool((found_B > grown.theta[at] * (1 + 1e-6)).any()))
        beyond.append(bool((ascend(far, analysis.images, rung.most_B, steps=40, starts=4) > 1 + 1e-6).any()))
    return any(beyond)


def input_of(number: int, certifier: Image) -> Callable[[Tensor], Tensor]:
    """x -> the input of the hidden units of a block."""
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


def test_chernoff_is_below_the_quantile() -> None:
    """Of chi-square with M degrees of freedom, by its series; and not far below."""
    for count, chance in ((64, 1e-3), (256, 1e-12), (512, 1e-17)):
        x = least_square_sum(count, chance)
        below = math.exp(chi_square_log(count, x))
        assert below <= chance
        assert math.exp(chi_square_log(count, 1.3 * x)) > chance


def chi_square_log(count: int, x: float) -> float:
    """log P[chi^2 <= x] = log of x^(k/2) e^(-x/2) sum_n x^n / ... (the incomplete gamma function)."""
    s, y = count / 2, x / 2
    term, total, n = 1 / s, 1 / s, s
    for _ in range(2000):
        n += 1
        term *= y / n
        total += term
    return s * math.log(y) - y + math.log(total) - math.lgamma(s)


def test_the_nonce_chooses_the_starts_and_the_batch_does_not() -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 6, 2)
    whole = Image(model, nonce="one").analyse(x, y).at(0.1)
    alone = [Image(model, nonce="one").analyse(x[i : i + 1], y[i : i + 1]).at(0.1) for i in range(6)]
    torch.testing.assert_close(whole.loss_B, torch.cat([one.loss_B for one in alone]), rtol=1e-6, atol=1e-9)
    other = Image(model, nonce="two").analyse(x, y).at(0.1)
    torch.testing.assert_close(whole.loss_B, other.loss_B, rtol=0.1, atol=1e-6)


def test_an_answer_does_not_hang_on_what_was_asked_before() -> None:
    _, one = analysis_of("standard", count=6)
    _, other = analysis_of("standard", count=6)
    radius_B = radius_of(one)
    for eps in (0.3, 0.001, 0.1):
        one.at(eps)
    for share in (0.9, 1.0, 1.1):
        torch.testing.assert_close(one.at(share * radius_B).loss_B, other.at(share * radius_B).loss_B)


def test_the_chance_is_counted() -> None:
    _, analysis = analysis_of("standard")
    assert analysis.failure == analysis.inner.failure == 0
    analysis.at(1.02 * radius_of(analysis.inner))
    assert analysis.rungs[0]
    assert max(rung.ellipsoids.failure for _, rung in analysis.rungs[0]) <= analysis.failure < 1e-6
    assert analysis.failure > ellipsoid.PROBE_FAILURE + 4 * lanczos.FAILURE


@pytest.mark.parametrize("eps", [0.0, 1e-9, 1e9])
def test_extreme_radii_have_an_answer(eps: float) -> None:
    _, analysis = analysis_of("standard")
    certificate = analysis.at(eps)
    assert certificate.certified_B.all() == (eps < 1)
    assert not certificate.loss_B.isnan().any()
