"""Quadratic forms of the core of attention: ascent within the reaches beats none, and dense matrices agree.

The change of (q, k, v) is eta = M u, |u| <= r, like the change that an image causes. Letters: B instances, C gradients,
H heads, N tokens, W width of a head, X numbers of u.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tools.ascent import ascend
from tests.tools.attention_cases import masked, random_
from tests.tools.attention_cores import (
    ONE,
    RADII,
    SCORES,
    B,
    Case,
    H,
    N,
    W,
    X,
    case_of,
    excess_of_signed,
    share_of_gradient,
    share_of_rest,
    share_of_third,
    share_of_third_norm,
    squared,
)
from tests.tools.cases import mostly_slow
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.gpsa import GPSA
from zoo.attention.l2 import L2Attention
from zoo.attention.lipschitz_norm import LipschitzNormAttention
from zoo.attention.scsa import ScaledCosineAttention
from zoo.attention.theory import forms, third_norm
from zoo.attention.theory.forms import CoreForms, ScoreRange
from zoo.attention.theory.squares import QKV, ScoreValueSquares
from zoo.attention.theory.third_forms import ThirdRows
from zoo.attention.window import WindowAttention
from zoo.bounds.curvature import expansion_of


@pytest.mark.parametrize("r", mostly_slow(RADII, 0.3))
@pytest.mark.parametrize("score", mostly_slow(SCORES, "dot product", "tied distances"))
def test_no_ascent_within_the_reaches_beats_a_form(score: str, r: float) -> None:
    """The reaches are exact."""
    case = case_of(SCORES[score])
    by_gradient, by_rest = share_of_gradient(case, r), share_of_rest(case, r)
    print(f"{score} {r}: of gradient {by_gradient.median():.3f}, of rest {by_rest.median():.4f}")
    assert (by_gradient <= 1 + 1e-6).all()
    assert (by_rest <= 1 + 1e-6).all()
    assert (excess_of_signed(case, r) <= 1e-6).all()


@pytest.mark.parametrize("score", mostly_slow(SCORES, "dot product", "tied distances"))
def test_no_ascent_beats_the_third_order(score: str) -> None:
    found = torch.cat([share_of_third(case_of(SCORES[score]), r) for r in (1e-3, 0.03)])
    print(f"{score}: of third order {found.median():.3f}")
    assert (found <= 1 + 1e-6).all()
    assert found.max() > 0.1


@pytest.mark.parametrize(
    ("r", "small"), mostly_slow([(0.003, 1.0), (0.01, 1.0), (0.03, 0.3), (0.03, 1.0)], (0.01, 1.0))
)
@pytest.mark.parametrize("score", mostly_slow(SCORES, "dot product", "tied distances"))
def test_no_ascent_beats_the_norm_of_the_third_order(score: str, r: float, small: float) -> None:
    """Within a share of the reach, the form holds after it shrinks."""
    case = case_of(SCORES[score])
    found, known = share_of_third_norm(case, r, small), case.third(r).largest[0].isfinite()
    print(f"{score} {r}: of third order {found[known].sqrt().median():.3f}, known {known.double().mean():.1f}")
    assert known.sum() > 3
    assert (found[known] <= 1 + 1e-6).all()
    assert found[known].max() > 1e-3


@pytest.mark.parametrize("score", SCORES)
def test_the_second_derivative_is_that_of_double_backward(score: str) -> None:
    """It is symmetric, and its rounding is far below its own bound."""
    case, generator = case_of(SCORES[score]), torch.Generator().manual_seed(0)
    a, b = (torch.randn(B, X, generator=generator, dtype=torch.float64) for _ in range(2))
    u = torch.zeros(B, X, dtype=torch.float64).requires_grad_(True)
    (slope,) = torch.autograd.grad((case.g[0] * case.moved(case.eta(u))).sum(), u, create_graph=True)
    (wanted,) = torch.autograd.grad((slope * a).sum(), u)
    found, turned = (case.forms.bilinear(case.eta(one)[None], case.eta(two)[None]) for one, two in ((a, b), (b, a)))
    torch.testing.assert_close((case.g * found).flatten(2).sum(-1)[0], (wanted * b).sum(1))
    size = case.eta(a).flatten(1).norm(dim=1) * case.eta(b).flatten(1).norm(dim=1)
    assert ((found - turned)[0].flatten(1).norm(dim=1) <= case.forms.bilinear_rounding * size).all()
    assert (case.forms.bilinear_rounding * size <= 1e-9 * (1 + found[0].flatten(1).norm(dim=1) * 1e3)).all()


@pytest.mark.parametrize("score", SCORES)
def test_within_a_small_reach_the_signed_form_is_minus_the_hessian(score: str) -> None:
    """Compare with double backward."""
    case = case_of(SCORES[score])
    form, eta = case.forms.signed(case.g, case.reach(1e-6)).form, torch.zeros(B, 3, H, N, W, dtype=torch.float64)
    u = eta.new_zeros(B, X).requires_grad_(True)
    (slope,) = torch.autograd.grad((case.g[0] * case.moved(case.eta(u))).sum(), u, create_graph=True)
    v = torch.randn(B, X, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (wanted,) = torch.autograd.grad((slope * v).sum(), u)
    found = torch.einsum("xb...,b...->bx", case.m_XB3HNW, form.apply(case.eta(v)[None])[0])
    torch.testing.assert_close(found, -wanted, rtol=1e-3, atol=float(1e-4 * wanted.abs().max()))


@pytest.mark.parametrize("r", mostly_slow((0.03, 1.0, 30.0, 1e4), 1.0))
@pytest.mark.parametrize("score", mostly_slow(SCORES, "dot product", "tied distances"))
def test_no_ascent_beats_what_holds_everywhere(score: str, r: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores may move without limit."""
    monkeypatch.setattr(ScoreRange, "__init__", unbounded(ScoreRange.__init__))
    case = case_of(SCORES[score])
    by_gradient, by_rest = share_of_gradient(case, r), share_of_rest(case, r)
    print(f"{score} {r}: of gradient {by_gradient.median():.2g}, of rest {by_rest.median():.2g}")
    assert (by_gradient <= 1 + 1e-6).all()
    assert (by_rest <= 1 + 1e-6).all()
    assert (by_rest > 1e-4).any()


def unbounded(init: Callable[..., None]) -> Callable[..., None]:
    """Return reaches of which nothing is known."""

    def of(self: ScoreRange, *known: Any) -> None:
        init(self, *known)
        self.bounded = torch.zeros_like(self.bounded)

    return of


def dense(case: Case, apply: Callable[[Tensor], Tensor]) -> Tensor:
    """Return C (B, 3HNO, 3HNO), by applying it to every unit vector."""
    eye = torch.eye(3 * H * N * W, dtype=torch.float64).view(-1, 1, 3, H, N, W).expand(-1, B, -1, -1, -1, -1)
    return torch.cat([apply(one[None]) for one in eye]).flatten(2).permute(1, 0, 2)


@pytest.mark.parametrize("r", [0.0, 1e-3, 0.5])
@pytest.mark.parametrize("score", SCORES)
def test_forms_are_symmetric_not_negative_and_below_their_largest(score: str, r: float) -> None:
    case = case_of(SCORES[score])
    for form in (case.forms.of_gradient(case.g, case.reach(r)), case.forms.of_rest(case.reach(r), ONE)):
        c = dense(case, form.apply)
        size = c.abs().amax((-2, -1)).clamp_min(1e-300)
        assert ((c - c.mT).abs().amax((-2, -1)) <= 1e-12 * size).all()
        values = torch.linalg.eigvalsh(c)
        assert (values[:, 0] >= -1e-9 * size).all()
        assert (form.largest[0] >= values[:, -1] * (1 - 1e-12)).all()
        assert form.largest.shape == (1, B)
        assert (form.largest[0] / values[:, -1].clamp_min(1e-9)).median() < 30
    form, absolute = case.forms.signed(case.g, case.reach(r))
    c, most = dense(case, form.apply), dense(case, absolute.apply)
    size = most.abs().amax((-2, -1)).clamp_min(1e-300)
    assert ((c - c.mT).abs().amax((-2, -1)) <= 1e-12 * size).all()
    for between in (most - c, most + c):
        assert (torch.linalg.eigvalsh(between)[..., 0] >= -1e-9 * size).all()
    assert (torch.linalg.matrix_norm(c, 2) <= form.largest[0]).all()


@pytest.mark.parametrize("score", SCORES)
def test_at_small_reach_the_form_is_near_the_true_second_order(score: str) -> None:
    """Compare lambda_max of the form on the reached set with the largest -<g, R> found."""
    case, r = case_of(SCORES[score]), 1e-3
    m = case.m_XB3HNW.flatten(2).permute(1, 2, 0)
    c = dense(case, case.forms.of_gradient(case.g, case.reach(r)).apply)
    bound = 0.5 * torch.linalg.eigvalsh(m.mT @ c @ m)[:, -1] * r**2

    def dip(u: Tensor) -> Tensor:
        many = len(u) // B
        return -(case.g[0].repeat(many, 1, 1, 1) * case.rest(case.eta(u))).flatten(1).sum(1)

    found = ascend(dip, torch.zeros(B, X).double(), torch.full((B,), r).double(), 100, 6)
    share = bound / found
    print(score, share)
    assert (share >= 1 - 1e-6).all()
    assert share.median() < 3


@pytest.mark.parametrize("score", SCORES)
def test_the_functionals_are_linear_and_their_sizes_are_lengths(score: str) -> None:
    """The first are the linear changes of the scores, minus their means."""
    case = case_of(SCORES[score])
    eye = torch.eye(3 * H * N * W, dtype=torch.float64).view(-1, 1, 3, H, N, W).expand(-1, B, -1, -1, -1, -1)
    torch.testing.assert_close(case.forms.squares(eye), case.forms.sizes.square(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("score", mostly_slow(SCORES, "tied distances"))
def test_a_smaller_reach_shrinks_the_rest_as_it_says(score: str) -> None:
    """The form t C of the large reach holds within the small one; t falls like its square at second order."""
    case = case_of(SCORES[score])
    for small, large in ((1e-3, 2e-3), (0.01, 0.02), (0.3, 5.0)):
        t = case.forms.shrink(case.reach(small), case.reach(large))
        assert (t <= 1).all()
        assert t.median() < 0.5 or large == 5.0  # bounds that hold everywhere do not shrink
        form = case.forms.of_rest(case.reach(large), ONE)

        def share(u: Tensor, form: Any = form, t: Tensor = t) -> Tensor:
            eta = case.eta(u)
            bound = t.repeat(len(u) // B) * squared(form.apply, eta)
            return case.rest(eta).flatten(1).square().sum(1) / bound.clamp_min(1e-300)

        found = ascend(share, torch.zeros(B, X).double(), torch.full((B,), small).double(), 40, 4)
        assert (found <= 1 + 1e-6).all()
    t = case.forms.shrink(case.reach(1e-5), case.reach(2e-5))
    torch.testing.assert_close(t, torch.full_like(t, 0.25), rtol=0.01, atol=0)
    torch.testing.assert_close(case.forms.shrink(case.reach(1.0), case.reach(1.0)), torch.ones(B).double())


@pytest.mark.parametrize("reach", [0.0, 1e-300, 1e-12, 1e12, 1e40, float("inf")])
@pytest.mark.parametrize("score", SCORES)
def test_extreme_reaches_have_an_answer(score: str, reach: float) -> None:
    case = case_of(SCORES[score])
    whole = torch.full_like(case.reach(1.0), reach)
    rest, gradient = case.forms.of_rest(whole, ONE), case.forms.of_gradient(case.g, whole)
    for form in (rest, gradient, *case.forms.signed(case.g, whole)):
        assert not form.largest.isnan().any()
        assert not torch.as_tensor(form.constant).isnan().any()
        assert torch.isfinite(form.apply(case.m_XB3HNW[:1])).all()
        assert torch.isfinite(form.largest).all()
    assert not case.forms.shrink(whole, whole).isnan().any()
    assert not case.forms.shrink(0 * case.reach(1.0), whole).isnan().any()
    if reach == 0:
        assert squared(rest.apply, case.m_XB3HNW[0]).max() < 1e-9


def test_a_gradient_that_vanishes_costs_nothing() -> None:
    case = case_of(SCORES["dot product"])
    form = case.forms.of_gradient(0 * case.g, case.reach(0.1))
    assert form.apply(case.m_XB3HNW[:1]).abs().max() < 1e-9


def without_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoreForms, "t1", lambda *_: [])


def one_sided_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return m on the scores alone."""
    init = ScoreValueSquares.__init__
    monkeypatch.setattr(
        ScoreValueSquares,
        "__init__",
        lambda self, scores, a, b, m, u: init(self, scores, a, b, m, u * (m.unsqueeze(-1) * 1e-3).clamp_max(1)),
    )


def keys_do_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    init = ScoreRange.__init__
    monkeypatch.setattr(
        ScoreRange, "__init__", lambda self, core, linear, eta: init(self, core, linear, eta * keys_off(eta))
    )


def keys_off(eta: Tensor) -> Tensor:
    return torch.tensor([1.0, 0.0, 1.0]).double().view(3, 1, 1, 1).expand_as(eta)


def values_do_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms.ValueSquares, "apply", lambda self, eta: QKV(*(0 * one for one in eta)))


def third_norm_without_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(third_norm._Moment, "of_scores", lambda self: 0 * self.a)


def third_norm_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(third_norm._Moment, "of_values", lambda self: 0 * self.mu)


def third_order_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThirdRows, "fourth", lambda self, c: 0 * c)
    monkeypatch.setattr(ThirdRows, "line", lambda self, *w: 0 * w[0])


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], float]] = {
    "T1 forgotten": (without_products, 1e-3),
    "m on one side": (one_sided_weight, 1e-3),
    "reach of k forgotten": (keys_do_not_reach, 0.3),
    "change of values forgotten": (values_do_not_move, 1e-3),
    "terms of third order forgotten": (third_order_too_small, 1e-3),
    "norm of third order without scores": (third_norm_without_scores, 0.01),
    "norm of third order without values": (third_norm_without_values, 0.01),
}


@pytest.mark.slow  # other forms under the same search: zoo/bounds/test_forms.py
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same search detects it."""
    plant, r = FAULTS[fault]
    plant(monkeypatch)
    found = torch.cat([share(c, r) for c in map(only, range(6)) for share in (*SHARES, known_third_norm)])
    print(fault, found.max())
    assert found.max() > 1.01


SHARES = (share_of_gradient, share_of_rest, share_of_third)


def known_third_norm(case: Case, r: float) -> Tensor:
    known = case.third(r).largest[0].isfinite()
    return torch.where(known, share_of_third_norm(case, r), 0.0)


def only(seed: int) -> Case:
    return case_of(SCORES["dot product"], seed)


KINDS: dict[str, Callable[[], Any]] = {  # those whose first leaf is only their projection
    "dot product": lambda: DotProductAttention(12, 2),
    "gated positions": lambda: GPSA(DotProductAttention(12, 2)),
    "window": lambda: WindowAttention(DotProductAttention(12, 2), (2, 2)),
    "L2": lambda: L2Attention(12, 2),
    "L2 with keys": lambda: L2Attention(12, 2, tied=False),
    "masked": lambda: masked(1.0, 2),
    "window of L2": lambda: WindowAttention(L2Attention(12, 2), (2, 2)),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "SCSA": lambda: ScaledCosineAttention(12, 2),
    "gated SCSA": lambda: GPSA(ScaledCosineAttention(12, 2)),
    "LN": lambda: LipschitzNormAttention(12, 2),
    "window of LN": lambda: WindowAttention(LipschitzNormAttention(12, 2), (2, 2)),
}


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_the_leaves_of_an_attention_are_its_chain(kind: str) -> None:
    """Check their outputs, the Jacobian through them and its transpose, and that no gain is too small."""
    torch.manual_seed(0)
    module = random_((KINDS | OTHERS)[kind](), 1.0)
    x = torch.randn(3, 4, 12).double()
    whole = expansion_of(module)(x)
    torch.testing.assert_close(whole.parts[-1].y, whole.y)
    v, g = torch.randn(2, *x.shape).double(), torch.randn(2, *x.shape).double()
    pushed, pulled = v, g
    for leaf in whole.parts:
        out = leaf.push(pushed)
        assert out.shape[1:] == leaf.y.shape
        assert (out.flatten(2).norm(dim=-1) <= leaf.gain_B * pushed.flatten(2).norm(dim=-1) * (1 + 1e-9)).all()
        pushed = out
    for leaf in reversed(whole.parts):
        pulled = leaf.pull(pulled)
    torch.testing.assert_close(pushed, whole.push(v))
    torch.testing.assert_close(pulled, whole.pull(g))
    assert all(leaf.affine or leaf.forms is not None for leaf in whole.parts)
    assert sum(leaf.forms is not None for leaf in whole.parts) == (2 if "SCSA" in kind else 1)


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "gated positions", "window of L2"))
def test_ascent_over_tokens_beats_no_form(kind: str) -> None:
    """Go through the projections, as the certificate does."""
    torch.manual_seed(1)
    module = random_(KINDS[kind](), 1.0)
    x, g, r = torch.randn(6, 4, 12).double(), torch.randn(1, 6, 4, 12).double(), 0.05
    whole = expansion_of(module)(x)
    project, core, merge = whole.parts
    assert core.forms is not None
    eye = torch.eye(48, dtype=torch.float64).view(48, 1, 4, 12).expand(-1, 6, -1, -1)
    form = core.forms.of_gradient(merge.pull(g), core.forms.squares(project.push(eye)).sqrt() * r)

    def share(z: Tensor) -> Tensor:
        many = len(z) // 6
        h = (z - x.repeat(many, 1, 1)).view(many, 6, 4, 12)
        rest = module(z).view(h.shape) - whole.y - whole.push(h)
        eta = project.push(h)
        bound = (eta * torch.cat([form.apply(one[None]) for one in eta])).flatten(2).sum(-1) / 2
        return (-(g * rest).flatten(2).sum(-1) / bound.clamp_min(1e-300)).flatten()

    found = ascend(share, x, torch.full((6,), r).double(), 60, 6)
    print(kind, found.median())
    assert (found <= 1 + 1e-6).all()
    assert found.median() > 0.15
