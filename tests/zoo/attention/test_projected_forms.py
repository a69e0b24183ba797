"""Forms of the leaves that begin with a projection: cosines, and the core of Lipschitz normalisation with what c adds.

Ascent within the reaches beats none, and neither does it beat the steps of the proof one by one. Letters: B inputs, S
points, K axes of the changes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tools.ascent import ascend
from tests.tools.attention_cases import random_
from tests.tools.attention_variants import D, H, N
from tests.tools.cases import mostly_slow
from zoo.attention.gpsa import GPSA, mixing
from zoo.attention.lipschitz_norm import LipschitzNormAttention
from zoo.attention.scsa import ScaledCosineAttention
from zoo.attention.softmax.projected_forms import ProjectedForms
from zoo.attention.softmax.qkv import PLAIN, AttentionBounds
from zoo.attention.softmax.quotient import least_maximum
from zoo.attention.softmax.quotient_forms import TemperedForms
from zoo.bounds.contracts import Expansion, QuadraticForm

B, K = 24, 5
KINDS: dict[str, Callable[[], nn.Module]] = {
    "ln": lambda: LipschitzNormAttention(D, H),
    "gpsa ln": lambda: GPSA(LipschitzNormAttention(D, H)),
    "scsa": lambda: ScaledCosineAttention(D, H, tau=2.0, nu=1.5, eps=0.5),
}


@dataclass(frozen=True)
class Case:
    """The first leaf of an attention around x (B, N, D), and changes H = L v, |v| <= 1, with |H| <= r."""

    leaf: Expansion
    forms: ProjectedForms
    f: Callable[[Tensor], Tensor]
    x: Tensor
    axes: Tensor  # L (K, B, N, D)
    reach: Tensor

    def change(self, v: Tensor) -> Tensor:
        return torch.einsum("sbk,kb...->sb...", v.unflatten(0, (-1, B)), self.axes)

    def rest(self, v: Tensor) -> Tensor:
        """Return R(H) (S, B, *y)."""
        change = self.change(v)
        return torch.stack([self.f(self.x + h) for h in change]) - self.leaf.y - self.leaf.push(change)

    def worst(self, value: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the largest value over |v| <= 1 that ascent finds: (B,)."""
        start = torch.zeros(B, K, dtype=torch.float64)
        return ascend(lambda v: value(v).flatten(), start, torch.ones(B).double(), steps=30, starts=4)


def cases(kind: str, share: float, modules: int = 4) -> Iterator[Case]:
    """Return weights and inputs of all sizes, with changes of this share of the input's size."""
    torch.manual_seed(0)
    for i in range(modules):
        module = random_(KINDS[kind](), 2.0 ** (i - 2))
        around, content = (mixing(module), module.content) if isinstance(module, GPSA) else (PLAIN, module)
        bounds = AttentionBounds(module, content, around)
        x = torch.randn(B, N, D).double() * 10 ** torch.empty(B, 1, 1).uniform_(-0.5, 0.7).double()
        with torch.no_grad():
            leaf = bounds.expand(x).parts[0]
        assert isinstance(leaf.forms, ProjectedForms)
        axes, r_B = torch.randn(K, B, N, D).double(), share * x.flatten(1).norm(dim=1)
        axes[1:, 1::2] *= 0.1  # mostly one direction
        axes[0, 3::4] = x[3::4]  # that of the input
        axes[0, 2::4, 1:] = 0  # a single token
        length_B = torch.linalg.matrix_norm(axes.flatten(2).movedim(1, 0), 2)
        axes = axes * (r_B / length_B)[:, None, None]
        squares = leaf.forms.squares(axes)
        reach = torch.minimum(squares.sqrt(), leaf.forms.sizes * r_B.view(-1, *(1,) * (squares.ndim - 1)))
        yield Case(leaf, leaf.forms, partial(function, bounds), x, axes, reach * (1 + 1e-12))


def function(bounds: AttentionBounds, x: Tensor) -> Tensor:
    """Return what the leaf computes: heads before they are merged, or normalised queries, keys and values."""
    q, k, v = bounds.split.scores(*bounds.split.project(x).unbind(0))
    if bounds.split.score.s != 1:  # cosines, of which the core is a leaf of its own
        return torch.stack([q, k, v], 1)
    p = (q @ k.mT + bounds.mixing.bias(len(x))).softmax(-1)
    return bounds.mixing.mix(p) @ v


def energy(form: QuadraticForm, change: Tensor) -> Tensor:
    return (change * form.apply(change)).flatten(2).sum(-1)


@pytest.mark.parametrize("share", mostly_slow((0.003, 0.03, 0.2), 0.03))
@pytest.mark.parametrize("kind", KINDS)
def test_no_ascent_within_the_reaches_beats_a_form(kind: str, share: float) -> None:
    known, closest, farthest = 0, 0.0, 0.0
    for case in cases(kind, share):
        g = torch.randn(1, *case.leaf.y.shape, dtype=torch.float64)
        room = case.forms.collect(g)[0]
        weight = 0.5 + torch.rand(room.shape, dtype=torch.float64)
        room_of = case.forms.collect(case.forms.spread(torch.ones_like(room)[None]))[0]  # B^T B, which is diagonal
        rest = case.forms.of_rest(case.reach, weight)

        def lost(form: QuadraticForm, v: Tensor, case: Case = case, g: Tensor = g) -> Tensor:
            bound = energy(form, case.change(v)) / 2 + form.constant
            return -(g * case.rest(v)).flatten(2).sum(-1) / bound.clamp_min(1e-300)

        def moved(
            v: Tensor, case: Case = case, weight: Tensor = weight, of: Tensor = room_of, rest: QuadraticForm = rest
        ) -> Tensor:
            r = case.forms.collect(case.rest(v)) / of
            square = (weight * r).square().flatten(2).sum(-1)
            return square / (energy(rest, case.change(v)) + rest.constant).clamp_min(1e-300)

        for form in (case.forms.of_gradient(g, case.reach), case.forms.signed(g, case.reach).absolute):
            found, finite = case.worst(partial(lost, form)), torch.isfinite(form.constant + form.largest[0]).flatten()
            assert (found[finite] <= 1 + 1e-6).all()
            known, closest = known + int(finite.sum()), max(closest, float(found[finite].max()))
        finite = torch.isfinite(rest.largest[0] + rest.constant).flatten()
        found = case.worst(moved)[finite].sqrt()
        assert (found <= 1 + 1e-6).all()
        farthest = max(farthest, float(found.max()))
    print(f"{kind} {share}: known {known} of {8 * B}, closest {closest:.3f}, of rest {farthest:.4f}")
    assert known > 4 * B
    assert closest > 3e-4
    assert farthest > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_forms_are_symmetric_and_below_their_largest(kind: str) -> None:
    for case in cases(kind, 0.03, modules=2):
        g = torch.randn(2, *case.leaf.y.shape, dtype=torch.float64)
        room = case.forms.collect(g[:1])[0]
        for form in (case.forms.of_gradient(g, case.reach), case.forms.of_rest(case.reach, torch.ones_like(room))):
            u, v = torch.randn(2, len(form.largest), B, N, D, dtype=torch.float64)
            finite = torch.isfinite(form.largest)
            there, back = (u * form.apply(v)).flatten(2).sum(-1), (v * form.apply(u)).flatten(2).sum(-1)
            length = (u.flatten(2).norm(dim=-1) * v.flatten(2).norm(dim=-1))[finite]
            torch.testing.assert_close((there[finite]) / length, back[finite] / length)
            assert ((energy(form, u) / u.square().flatten(2).sum(-1))[finite] <= form.largest[finite]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_smaller_reach_shrinks_the_bound_as_it_says(kind: str) -> None:
    """Ascent on changes of a third of the size does not beat t times the form for the whole."""
    for case in cases(kind, 0.06, modules=2):
        room = case.forms.collect(case.leaf.y[None])[0]
        of = case.forms.collect(case.forms.spread(torch.ones_like(room)[None]))[0]
        rest, share = (
            case.forms.of_rest(case.reach, torch.ones_like(room)),
            case.forms.shrink(case.reach / 3, case.reach),
        )

        def moved(
            v: Tensor, case: Case = case, of: Tensor = of, rest: QuadraticForm = rest, share: Tensor = share
        ) -> Tensor:
            square = (case.forms.collect(case.rest(v / 3)) / of).square().flatten(2).sum(-1)
            return square / (share * (energy(rest, case.change(v / 3)) + rest.constant)).clamp_min(1e-300)

        finite = torch.isfinite(rest.largest[0] + rest.constant).flatten()
        assert (share <= 1).all()
        assert share[finite].min() < 0.9
        assert (case.worst(moved)[finite] <= 1 + 1e-6).all()


def test_the_longest_of_rows_cannot_be_shorter_than_the_least_maximum() -> None:
    """It is reached by cutting the longest rows to one length, which no ascent gets below."""
    torch.manual_seed(0)
    rows, whole = torch.rand(200, 6).double() + 0.05, torch.rand(200).double() * 1.5
    level = least_maximum(rows, whole)
    cut = (rows - level[:, None]).clamp_min(0)
    assert (cut.square().sum(-1) <= whole.square() * (1 + 1e-9)).all()
    reached = level > 0
    torch.testing.assert_close(cut.square().sum(-1)[reached], whole.square()[reached])
    shortest = -ascend(lambda x: -x.abs().amax(-1), rows, whole, steps=60, starts=4)
    assert (shortest >= level - 1e-9).all()
    assert ((shortest - level) / rows.amax(-1) < 0.05).double().mean() > 0.5
    assert (least_maximum(rows, torch.full((200,), 9.0).double()) == 0).all()


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
def test_every_step_of_the_bound_of_a_quotient_holds(share: float) -> None:
    """Ascent on c / c', on the longest key, and on the effect of c on every row beside what is linear in it."""
    closest = dict.fromkeys(("factor", "longest", "effect"), 0.0)
    for case in cases("ln", share, modules=3):
        forms = case.forms.inner
        assert isinstance(forms, TemperedForms)
        moved = forms.moved(case.reach)
        known = torch.isfinite(moved.factor).all(-1)
        effect = forms._norm(case.reach)
        for head in range(moved.factor.shape[1]):

            def shares(
                v: Tensor, name: str, case: Case = case, head: int = head, all_of: Any = (moved, effect)
            ) -> Tensor:
                moved, effect = all_of
                t, longest, added = held(case, v)
                found = {
                    "factor": ((t - 1).abs() / moved.factor),
                    "longest": longest / moved.longest,
                    "effect": (added.norm(dim=-1) / effect).amax(-1),
                }
                return found[name][..., head]

            for name in closest:
                found = case.worst(partial(shares, name=name))[known]
                assert (found <= 1 + 1e-9).all()
                closest[name] = max(closest[name], float(found.max()))
    print(share, closest)
    assert closest["effect"] > 1e-3
    assert closest["factor"] > 0.5


def held(case: Case, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return t and the longest key of every head (S, B, H), and what t adds to R (S, B, H, N, O)."""
    forms = case.forms.inner
    assert isinstance(forms, TemperedForms)
    change = case.forms.first.push(case.change(v))
    q, k, w = (case.forms.first.y + change).unbind(2)
    u, (k_max, v_max) = q.flatten(-2).norm(dim=-1), (rows.norm(dim=-1).amax(-1) for rows in (k, w))
    c = torch.maximum(u * torch.maximum(k_max, v_max), k_max * v_max)
    t = 1 / (forms.scale_BH * c)
    scores = forms.scale_BH[..., None, None] * q @ k.mT
    core = forms.inner.core.core
    linear = (forms.norms.slopes * (change * forms.norms.n).sum((-2, -1))).sum(-2) * forms.scale_BH
    covariance = (core.p * core.turned(core.q, torch.zeros_like(core.k))) @ core.values
    there, here = ((one[..., None, None] * scores).softmax(-1) @ w for one in (t, torch.ones_like(t)))
    return t, k_max, there - here + linear[..., None, None] * covariance
