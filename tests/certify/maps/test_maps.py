"""Linear maps around a clean batch: the tape, and lengths and norms against dense Jacobians and what ascent finds."""

import math

import pytest
import torch
from torch import Tensor

from certify.maps.ellipsoid import Ellipsoids, Joint, Noise, least_square_sum
from certify.methods.image import Image
from tests.certify.methods.test_image import CLOSE, SMOOTH, analysis_of, rung_of, situation
from tests.tools.ascent import ascend
from tests.tools.small_models import PARTS
from zoo.bounds.elementwise import UnitForms
from zoo.bounds.tape import Tape, Vectors


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
