"""Forms on the ball of images: every quantity against what ascent finds, and against dense Jacobians."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from certify import certified_radius
from certify.api import radius_of
from certify.methods import image
from certify.methods.adjoint import Adjoint
from certify.methods.image import Image, ImageAnalysis, least_square_sum
from tests.certify.methods.test_certify import margin_loss
from tests.tools.ascent import ascend
from tests.tools.small_models import PARTS, labelled, small_model
from zoo.attention.parts import CoreLeafForms
from zoo.bounds.activations import Smooth
from zoo.bounds.contracts import Expansion
from zoo.bounds.elementwise import UnitForms
from zoo.bounds.tape import Tape

ROOT = Path(__file__).parents[3]
EPS = (0.02, 0.2)
SMOOTH = ("standard", "smooth", "cls")  # parts with hidden units that have forms


def analysis_of(parts: str, seed: int = 0, count: int = 3) -> tuple[Image, ImageAnalysis]:
    model = small_model(parts, seed)
    certifier = Image(model, nonce="a nonce")
    ((_, found),) = certifier.analyse(*labelled(model, count, 1)).parts
    assert isinstance(found, ImageAnalysis)
    return certifier, found


def dense(analysis: ImageAnalysis, at: int) -> Tensor:
    """A_i (B, x, image), by pushing every unit vector."""
    images = analysis.images
    eye = torch.eye(images[0].numel(), dtype=torch.float64).view(-1, 1, *images.shape[1:]).expand(-1, *images.shape)
    return analysis.tape.push(eye, {}, at)[at].flatten(2).permute(1, 2, 0)


@pytest.mark.parametrize("parts", PARTS)
def test_the_tape_is_the_model(parts: str) -> None:
    """What arrives at the image is the gradient by autograd, and pushing is the transpose of pulling."""
    certifier, analysis = analysis_of(parts)
    x = analysis.images.clone().requires_grad_()
    logits = certifier.baked(x)
    label_B = analysis.clean.label_B
    rival_B = (label_B + 1) % logits.shape[1]
    margin_B = logits.gather(1, label_B[:, None]) - logits.gather(1, rival_B[:, None])
    (wanted,) = torch.autograd.grad(margin_B.sum(), x)
    found, _ = analysis._gradients(rival_B[None])
    torch.testing.assert_close(found[0], wanted)
    last = max(analysis.tape.leaves)
    v = torch.randn(2, *analysis.images.shape, dtype=torch.float64)
    pushed = analysis.tape.push(v, {}, last)[last]
    g = torch.randn_like(pushed)
    pulled, _ = analysis.tape.pull(None, {last: g})
    assert pulled is not None
    torch.testing.assert_close((pushed * g).sum(), (v * pulled).sum())


@pytest.mark.parametrize("parts", SMOOTH)
def test_norms_reaches_and_seminorms_are_those_of_dense_jacobians(parts: str) -> None:
    """Never below, and as close as each promises."""
    _, analysis = analysis_of(parts)
    eps_B = analysis._one * 0.05
    rho = analysis._rests(eps_B)
    for at in analysis.tape.bent:
        exact_B = torch.linalg.matrix_norm(dense(analysis, at), 2)
        share_B = analysis._lengths[at].by_image / exact_B
        assert (share_B >= 1).all()
        assert (share_B < 1.03).all()
        forms = analysis.tape.leaves[at].forms
        if not isinstance(forms, UnitForms):
            continue
        reach = analysis._lengths[at].reach_by_image
        assert reach is not None
        columns = dense(analysis, at).permute(2, 0, 1).unflatten(-1, analysis._input(at).shape[1:])
        share = reach / forms.squares(columns).sqrt()  # unit vectors: the exact lengths
        assert (share >= 1).all()
        assert (share < 1.8).all()
        form = forms.of_rest(analysis._reach(at, eps_B, rho))
        eye = torch.eye(analysis._input(at)[0].numel(), dtype=torch.float64)
        eye = eye.view(len(eye), 1, *analysis._input(at).shape[1:]).expand(-1, *analysis._input(at).shape)
        c = form.apply(eye).flatten(2).permute(1, 2, 0)
        assert (form.largest[0] >= torch.linalg.eigvalsh(c)[:, -1] * (1 - 1e-12)).all()
        a = dense(analysis, at)
        exact_B = torch.linalg.eigvalsh(a.mT @ c @ a)[:, -1].sqrt() * eps_B
        found_B = analysis._seminorm({at: form}, eps_B, {}, 1, "test")[0]
        assert (found_B >= exact_B * (1 - 1e-9)).all()
        assert (found_B <= exact_B * 1.03).all()


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("parts", PARTS)
def test_ascent_finds_no_image_that_loses_more(parts: str, eps: float) -> None:
    """Of the image's own bound, without the adjoint's help: for every rival."""
    certifier, analysis = analysis_of(parts, count=4)
    label_B, eps_B = analysis.clean.label_B, analysis._one * eps
    rho = analysis._rests(eps_B)
    for step in (1, 2, 3):
        rival_B = (label_B + step) % 4
        g_0, g = analysis._gradients(rival_B[None])
        loss_B = (g_0.flatten(2).norm(dim=-1) * eps_B + analysis._remainders(g, eps_B, rho, 0))[0]

        def drop(z: Tensor, rival_B: Tensor = rival_B) -> Tensor:
            logits = certifier.baked(z)
            many = len(z) // len(label_B)
            own, other = label_B.repeat(many)[:, None], rival_B.repeat(many)[:, None]
            return (logits.gather(1, other) - logits.gather(1, own))[:, 0]

        clean_B = drop(analysis.images)
        found_B = ascend(drop, analysis.images, eps_B, steps=60, starts=4) - clean_B
        assert (found_B <= loss_B * (1 + 1e-9)).all()
        assert (found_B > 0).all()


@pytest.mark.parametrize("parts", SMOOTH)
def test_remainders_of_units_stay_below_their_forms(parts: str) -> None:
    """At random changes of a leaf's input, of the size that its units reach: -<g, R> and |r|."""
    _, analysis = analysis_of(parts)
    eps_B = analysis._one * 0.3
    rho = analysis._rests(eps_B)
    for at in analysis.tape.bent:
        forms = analysis.tape.leaves[at].forms
        if not isinstance(forms, UnitForms):
            continue
        act, z = forms.activation, forms.z_BNH
        reach = analysis._reach(at, eps_B, rho)
        d = reach * (2 * torch.rand(64, *z.shape, dtype=torch.float64) - 1)
        w = torch.randn_like(z)
        exact = act_value(act, z, d)
        assert (-w * exact <= act.parabola(z, w, reach) * d.square() / 2 + 1e-9).all()
        assert (exact.abs() <= act.chord(z, reach) * d.abs() + 1e-9).all()


def act_value(act: Smooth, z: Tensor, d: Tensor) -> Tensor:
    """sigma(z + d) - sigma(z) - sigma'(z) d, by quadrature of sigma'."""
    nodes = torch.linspace(0, 1, 201, dtype=torch.float64).view(-1, *(1,) * d.ndim)
    slopes = act.slope(z + nodes * d) - act.slope(z)
    return torch.trapezoid(slopes, dx=1 / 200, dim=0) * d


@pytest.mark.parametrize("parts", PARTS)
def test_radii_are_never_below_the_adjoint_ones_and_ascent_beats_none(parts: str) -> None:
    model = small_model(parts, 1)
    x, y = labelled(model, 8, 2)
    adjoint_B, image_B = (certified_radius(model, x, y, method=method) for method in ("adjoint", "image"))
    assert (image_B >= adjoint_B * (1 - 2**-8)).all()
    baked = Adjoint(model).baked
    found_B = ascend(margin_loss(baked, y), x.double(), image_B, steps=40, starts=4)
    assert not ((found_B > 0) & (image_B > 0)).any()


def test_remainders_of_the_committed_model_are_a_fraction_of_the_adjoint_ones() -> None:
    """Of a label's closest rival at 36/255: the loss less what is first order."""
    model, _ = zoo.handover.load(ROOT / "benchmarks" / "results" / "cert_vit_c10")
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    x = torch.nn.functional.interpolate(x, 32, mode="bicubic").clamp(0, 1)  # smooth, as images are
    y = model(x).argmax(1)
    ((_, analysis),) = Image(model, nonce="one").analyse(x, y).parts
    assert isinstance(analysis, ImageAnalysis)
    eps_B, inner = analysis._one * 36 / 255, analysis.inner
    rival_B = analysis.clean.margin_BJ.argmin(1)
    g_0, g = analysis._gradients(rival_B[None])
    rest_B = analysis._remainders(g, eps_B, analysis._rests(eps_B), 0)[0]
    by_adjoint_B = inner.rivals(0, 1).tight(inner.radii(eps_B), torch.ones(1, 2, dtype=torch.bool))[0]
    assert (rest_B < 0.5 * (by_adjoint_B - g_0[0].flatten(1).norm(dim=1) * eps_B)).all()


def test_forms_of_attention_leave_a_fraction_of_its_remainder() -> None:
    """Content attention of large scores: against the same analysis with every attention as one leaf without forms."""
    _, analysis = analysis_of("standard", 1, count=2)
    share_B = remainder(analysis, 0.002) / remainder(without_core(analysis), 0.002)
    assert (share_B < 0.25).all()


def remainder(analysis: ImageAnalysis, eps: float) -> Tensor:
    """Of the closest rival (B,)."""
    eps_B = analysis._one * eps
    _, g = analysis._gradients(analysis.clean.margin_BJ.argmin(1)[None])
    return analysis._remainders(g, eps_B, analysis._rests(eps_B), 0)[0]


def without_core(analysis: ImageAnalysis) -> ImageAnalysis:
    other = ImageAnalysis(analysis.inner, analysis.images, analysis._seed)
    other.tape = Tape([whole(expansion) for expansion in analysis.inner.chain.expansions])
    return other


def whole(expansion: Expansion) -> Expansion:
    """Attention, which ends in three leaves of which the second is a core, in one piece."""
    if any(isinstance(part.forms, CoreLeafForms) for part in expansion.parts):
        return replace(expansion, parts=())
    return replace(expansion, parts=tuple(whole(part) for part in expansion.parts))


FAULTS: dict[str, Callable[[ImageAnalysis], object]] = {
    "rests forgotten": lambda a: setattr(a, "_rests", lambda eps_B: dict.fromkeys(a.tape.bent[:-1], 0 * eps_B)),
    "radii a quarter": lambda a: setattr(
        a,
        "_lengths",
        {at: replace(length, by_image=length.by_image / 4) for at, length in a._lengths.items()},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen_by_ascent(fault: str) -> None:
    """The same comparison of what leaves see with their radii as above, of a bound that is none."""
    certifier, analysis = analysis_of("standard", seed=1)
    assert not exceeded(certifier, analysis)
    FAULTS[fault](analysis)
    assert exceeded(certifier, analysis)


def exceeded(certifier: Image, analysis: ImageAnalysis) -> bool:
    """Does an image move the input of the last leaf further than it says, or further from its linear part?"""
    return any(exceeded_at(eps, certifier, analysis) for eps in (1e-4, 0.5))


def exceeded_at(eps: float, certifier: Image, analysis: ImageAnalysis) -> bool:
    eps_B = analysis._one * eps
    rho = analysis._rests(eps_B)
    last = max(at for at, leaf in analysis.tape.leaves.items() if leaf.forms is not None)
    radius_B = analysis._radius(last, eps_B, rho)
    point = input_of_last(certifier, analysis)
    clean = point(analysis.images)
    linear = dense(analysis, last)

    def far(z: Tensor) -> Tensor:
        many = len(z) // len(clean)
        return (point(z) - clean.repeat(many, *(1,) * (clean.ndim - 1))).flatten(1).norm(dim=1)

    def rest(z: Tensor) -> Tensor:
        many = len(z) // len(clean)
        change = (point(z) - clean.repeat(many, *(1,) * (clean.ndim - 1))).flatten(1)
        moved = (z - analysis.images.repeat(many, 1, 1, 1)).flatten(1)
        return (change - (linear.repeat(many, 1, 1) @ moved[..., None])[..., 0]).norm(dim=1)

    rest_B = radius_B - analysis._lengths[last].by_image * eps_B
    found_B = ascend(far, analysis.images, eps_B, steps=40, starts=4)
    found_rest_B = ascend(rest, analysis.images, eps_B, steps=40, starts=4)
    return bool((found_B > radius_B).any()) or bool((found_rest_B > rest_B + 1e-9).any())


def input_of_last(certifier: Image, analysis: ImageAnalysis) -> Callable[[Tensor], Tensor]:
    """x -> the input of the last hidden units."""
    block: Any = list(certifier.baked.get_submodule("blocks").children())[-1]

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


def test_the_chance_is_counted() -> None:
    _, analysis = analysis_of("standard")
    assert analysis.failure == analysis.inner.failure == 0
    beyond_B = 1.02 * radius_of(analysis.inner)
    analysis.at(beyond_B)
    once = analysis.failure
    analysis.at(1.01 * beyond_B)
    assert image.PROBE_FAILURE < once < analysis.failure < 1e-6


@pytest.mark.parametrize("eps", [0.0, 1e-9, 1e9])
def test_extreme_radii_have_an_answer(eps: float) -> None:
    _, analysis = analysis_of("standard")
    certificate = analysis.at(eps)
    assert certificate.certified_B.all() == (eps < 1)
    assert not certificate.loss_B.isnan().any()
