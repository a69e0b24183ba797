"""Ascent attacks the second order of attention and its local first-order rules, each form by itself.

Letters: B images, C gradients, N tokens, D width, H heads.
"""

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tools.ascent import ascend, largest_change
from tests.tools.attention_cases import IMAGES, MIXTURES, D, H, instance, instances, mixtures, random_
from tests.tools.cases import mostly_slow
from tests.tools.expansions import Instance, largest_dip, largest_gain, largest_remainder, report
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.gpsa import GPSA
from zoo.attention.l2 import L2Attention
from zoo.attention.lipschitz_norm import LipschitzNormAttention
from zoo.attention.local import heads_of
from zoo.attention.scsa import ScaledCosineAttention
from zoo.attention.softmax.module import SoftmaxAttention
from zoo.attention.softmax.parts import split_heads
from zoo.attention.theory.core import CoreRemainder, Forms
from zoo.attention.theory.joint import JointCore, same
from zoo.attention.theory.softmax_row import K2_MAX, SoftmaxRows, e1, e2, eigenvalue_upper, third_cumulant
from zoo.bounds.curvature import expansion_of
from zoo.bounds.first_order import layer_of, residual_layer_of
from zoo.bounds.links import Residual
from zoo.bounds.rule_table import types_where
from zoo.layers.norms import SmoothProject
from zoo.primitives.gates import Gate


def core_of(case: Instance) -> JointCore:
    module: Any = case.module
    q, k, v = module.projections(case.x)
    p = (module.scale * q @ k.mT).softmax(-1)
    return JointCore(heads_of(module), q, k, v, p, p)


def remainder_of(case: Instance, core: JointCore) -> CoreRemainder:
    return core.remainder(split_heads(case.g, core.heads.o_HOD))


def remainder_forms(case: Instance) -> Forms:
    """Return the remainder with the terms of each form alone, and with the least of each."""
    remainder, r = remainder_of(case, core_of(case)), same(case.r_B)
    t1, t2, t3 = remainder.terms(r)
    return {name: t1 + t2[name] + t3[name] for name in ("box", "exponential")} | {"least": remainder(r)}


def beta_forms(case: Instance) -> Forms:
    return core_of(case).beta_forms(same(case.r_B)) | {"least": expansion_of(case.module)(case.x).beta(case.r_B)}


Attacked = list[tuple[Instance, Tensor, Tensor]]


@pytest.fixture(scope="module")
def attacked() -> Attacked:
    """Return the largest -<g, R> and ||R|| that ascent finds."""
    return [(case, largest_dip(case)[0], largest_remainder(case)) for case in instances()]


def ratios(pairs: list[tuple[Forms, Tensor]]) -> dict[str, Tensor]:
    """Return bound / best found of each form, over all instances."""
    return {name: torch.cat([forms[name].flatten() / positive(best) for forms, best in pairs]) for name in pairs[0][0]}


def positive(best: Tensor) -> Tensor:
    """Return the positive ratios; G = 0 gives 0, which rounding may hide where attention is nearly linear."""
    return best.clamp_min(1e-300)


def test_no_ascent_beats_a_form_of_the_remainder(attacked: Attacked) -> None:
    found = ratios([(remainder_forms(case), dip) for case, dip, _ in attacked])
    report("remainder", found)
    for name, ratio in found.items():
        assert ratio.min() >= 1, name
    assert found["box"].median() > found["exponential"].median()
    assert found["least"].median() < 12.5, "looser than it was"
    assert found["least"].min() < 4, "the search is too weak to refute a bound that is this much too small"


def test_no_ascent_beats_a_form_of_beta(attacked: Attacked) -> None:
    found = ratios([(beta_forms(case), most) for case, _, most in attacked])
    report("beta", found)
    for name, ratio in found.items():
        assert ratio.min() >= 1, name
    assert found["least"].median() < 9.7, "looser than it was"
    assert found["least"].min() < 3.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXTURES, ids=lambda kind: kind.__name__)
def test_no_ascent_beats_attention_of_a_kind(kind: type[nn.Module]) -> None:
    """210 instances of four tokens each: remainder, beta, and the norm of J."""
    dips, mosts = [], []
    for case in mixtures(kind):
        expansion = case.expansion()
        dips.append(expansion.remainder(case.g)(case.r_B)[0] / positive(largest_dip(case, starts=3)[0]))
        mosts.append(expansion.beta(case.r_B) / largest_remainder(case, starts=3))
        assert (expansion.gain_B >= largest_gain(case) * (1 - 1e-9)).all()
    report(kind.__name__, {"remainder": torch.cat(dips), "beta": torch.cat(mosts)})
    assert torch.cat(dips).min() >= 1
    assert torch.cat(mosts).min() >= 1
    assert torch.cat(dips).median() < 15
    assert torch.cat(mosts).median() < 15


@pytest.mark.parametrize(
    ("kind", "residual"),
    mostly_slow(product(MIXTURES, (False, True)), (GPSA, False)),
    ids=lambda v: v.__name__ if isinstance(v, type) else str(v),
)
def test_no_ascent_beats_the_local_rule(kind: type[nn.Module], residual: bool) -> None:
    """The published rule is never better than the local one."""
    found: dict[str, list[Tensor]] = {"published": [], "local": []}
    for case in mixtures(kind):
        of = residual_layer_of if residual else layer_of
        published = of(case.module)(case.x)[1](case.r_B)
        y, bound = of(case.module, local=True)(case.x)

        def f(z: Tensor, module: nn.Module = case.module) -> Tensor:
            return z + module(z) if residual else module(z)

        torch.testing.assert_close(y, f(case.x))
        assert (bound(case.r_B) <= published * (1 + 1e-9)).all()
        best = largest_change(f, case.x, case.r_B)
        found["published"].append(published / best)
        found["local"].append(bound(case.r_B) / best)
    report(f"radius of {kind.__name__}", {name: torch.cat(ratio) for name, ratio in found.items()})
    assert torch.cat(found["local"]).min() >= 1 - 1e-9
    assert torch.cat(found["local"]).min() < 1.05


def test_every_local_rule_and_expansion_has_a_case() -> None:
    elsewhere = {L2Attention, ScaledCosineAttention, LipschitzNormAttention}
    kinds = set(MIXTURES) | elsewhere  # tested in test_curvature_variants.py; products in tests/zoo/primitives
    assert set(types_where(lambda rules: rules.local)) - {Gate} == kinds
    assert set(types_where(lambda facts: facts.local_residual)) <= set(MIXTURES)
    assert {kind for kind in types_where(lambda rules: rules.expansion) if issubclass(kind, SoftmaxAttention)} <= kinds


def test_local_reaches_every_part_of_a_chain() -> None:
    """A chain in a chain and a residual sum are covered."""
    case = next(instances())
    alone = {local: layer_of(case.module, local=local)(case.x)[1](case.r_B) for local in (False, True)}
    assert (alone[False] > alone[True]).all()
    chained = nn.Sequential(nn.Identity(), nn.Sequential(case.module))
    for local, bound_B in alone.items():
        torch.testing.assert_close(layer_of(chained, local=local)(case.x)[1](case.r_B), bound_B, rtol=0, atol=0)
        summed = Residual(nn.Identity(), chained).layer(local)
        torch.testing.assert_close(summed(case.x)[1](case.r_B), case.r_B + bound_B, rtol=0, atol=0)


@pytest.mark.parametrize("kind", MIXTURES, ids=lambda kind: kind.__name__)
def test_bounds_are_monotone_and_survive_zero_and_infinity(kind: type[nn.Module]) -> None:
    for case in mixtures(kind, modules=6):
        expansion = case.expansion()
        change = layer_of(case.module, local=True)(case.x)[1]
        remainder = expansion.remainder(torch.cat([case.g, 0 * case.g]))
        for bound in (change, expansion.beta, lambda r: remainder(r.unsqueeze(-2))):  # noqa: B023
            factors = (0.0, 1e-9, 1e-3, 0.1, 1.0, 1.001, 2.0, 10.0, 1e3, 1e200, math.inf)
            values = torch.stack([bound(case.r_B * factor) for factor in factors])
            assert (values[1:] >= values[:-1] * (1 - 1e-12)).all()
            assert (values[0] == 0).all()
            assert torch.isfinite(values[-3]).all()
            assert torch.isinf(values[-1]).all()
            stacked = bound(torch.stack([case.r_B, 2 * case.r_B]))
            torch.testing.assert_close(stacked, torch.stack([values[4], values[6]]))


def test_a_single_token_has_no_remainder() -> None:
    """P = 1 for any scores, so only rounding is left."""
    case = instance(random_(DotProductAttention(D, H), 1.0), tokens=1)
    expansion = case.expansion()
    assert (expansion.beta(case.r_B) <= 1e-10).all()
    assert (expansion.remainder(case.g)(case.r_B) <= 1e-9).all()


@pytest.mark.parametrize("kind", MIXTURES, ids=lambda kind: kind.__name__)
def test_pull_is_the_transpose_of_the_jacobian(kind: type[nn.Module]) -> None:
    for case in mixtures(kind, modules=4):
        x = case.x.clone().requires_grad_(True)
        (expected,) = torch.autograd.grad((case.module(x) * case.g[0]).sum(), x)
        torch.testing.assert_close(case.expansion().pull(case.g)[0], expected, rtol=1e-9, atol=1e-11)


# lemmas -----------------------------------------------------------------------------------------------------


def rows(count: int = 256) -> Tensor:
    """Return scores (B, 4) of all sharpnesses."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(count, 4, generator=generator).double()
    return scores * torch.logspace(-2, 0.7, count).double()[:, None]


def test_the_softmax_constants_hold_on_the_ball_and_are_nearly_attained() -> None:
    """Bound ||D softmax|| and ||D^2 softmax[v, v]|| at the worst point of the ball; 0.95 of them fails."""
    scores = rows()
    r = torch.logspace(-2, 0.5, len(scores)).double().roll(97)
    softmax = SoftmaxRows(scores.softmax(-1)[None, None])

    def jacobian(s: Tensor) -> Tensor:
        p = s.softmax(-1)
        return torch.linalg.eigvalsh(p.diag_embed() - p.unsqueeze(-1) * p.unsqueeze(-2))[..., -1]

    slope = (ascend(jacobian, scores, r, 60, 6) - 1e-15) / softmax.slope(r[None, None])[0, 0]
    assert slope.max() <= 1 + 1e-9
    assert slope.max() > 0.95

    generator = torch.Generator().manual_seed(1)
    v = torch.nn.functional.normalize(torch.randn(len(scores), 400, 4, generator=generator).double(), dim=-1)

    def second(s: Tensor) -> Tensor:
        p = s.softmax(-1)[:, None]
        centred = v - (p * v).sum(-1, keepdim=True)
        variance = (p * centred.square()).sum(-1, keepdim=True)
        return (p * (centred.square() - variance)).norm(dim=-1).amax(-1)

    curvature = second(scores) / softmax.curvature(torch.zeros(1, 1, len(scores)))[0, 0]
    assert curvature.max() <= 1 + 1e-9
    third = torch.tensor([[math.log((1 - 3**-0.5) / (1 + 3**-0.5)), 0.0]], dtype=torch.float64)
    p = third.softmax(-1)
    direction = torch.tensor([[0.5**0.5, -(0.5**0.5)]], dtype=torch.float64)
    centred = direction - (p * direction).sum()
    attained = float((p * (centred.square() - (p * centred.square()).sum())).norm())
    assert K2_MAX * (1 - 1e-9) < attained <= K2_MAX


def test_the_exponential_forms_hold_and_are_nearly_attained() -> None:
    """Bound <p' - p, c> and its excess over Cov(delta, c) at the worst delta; the third cumulant is needed."""
    scores = rows()
    p, r = scores.softmax(-1), torch.logspace(-2, 0.7, len(scores)).double().roll(97)
    c = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1)).double()
    c = c - (p * c).sum(-1, keepdim=True)

    def shares(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the shares of E1, and of E2 with and without the third cumulant."""
        p_z, c_z, s_z = (one.repeat(len(z) // len(scores), 1) for one in (p, c, scores))
        delta = z - s_z - (p_z * (z - s_z)).sum(-1, keepdim=True)
        moved = ((z.softmax(-1) - p_z) * c_z).sum(-1)
        tau, sd, sd_c = delta.abs().amax(-1), (p_z * delta.square()).sum(-1).sqrt(), (p_z * c_z.square()).sum(-1).sqrt()
        nonlinear = (moved - (p_z * delta * c_z).sum(-1)).abs()
        weighted = e2(tau) * (p_z * c_z.abs() * delta.square()).sum(-1)
        third = third_cumulant(tau, sd) * sd_c * sd.square()
        return moved.abs() / (e1(tau) * sd * sd_c), nonlinear / (weighted + third), nonlinear / weighted

    first, second, without = (float(ascend(lambda z, i=i: shares(z)[i], scores, r, 60, 6).max()) for i in range(3))  # type: ignore[misc]
    assert 0.99 < first <= 1
    assert 0.99 < second <= 1
    assert without > 1.05


def test_centring_is_never_below_the_largest_eigenvalue() -> None:
    """sum_k w_k z~_k^2 = z^T (I - p 1^T) diag(w) (I - 1 p^T) z."""
    p = rows().softmax(-1)
    w = 10 ** torch.empty(p.shape).uniform_(-4, 1, generator=torch.Generator().manual_seed(1)).double()
    away = torch.eye(p.shape[-1]).double() - p.unsqueeze(-2)  # I - 1 p^T
    largest = torch.linalg.eigvalsh(away.mT @ w.diag_embed() @ away)[..., -1]
    ratio = SoftmaxRows(p[None, None]).centring(w[None, None])[0, 0] / largest
    assert ratio.min() >= 1 - 1e-12
    assert ratio.min() < 1.1
    assert ratio.median() < 2


def test_e1_and_e2_are_rounded_up() -> None:
    t = torch.cat([torch.zeros(1), torch.logspace(-12, 1.69, 400)]).double()
    with localcontext() as context:
        context.prec = 80
        exact = [Decimal(value) for value in t[1:].tolist()]
        one = [(z.exp() - 1) / z for z in exact]
        two = [(z.exp() - 1 - z) / z**2 for z in exact]
        for form, values in ((e1, one), (e2, two)):
            for bound, value in zip(form(t)[1:].tolist(), values, strict=True):
                assert value <= Decimal(bound) <= value * Decimal(1 + 1e-10)
    assert e1(t)[0] >= 1
    assert e2(t)[0] >= 0.5


def test_eigenvalue_upper_is_never_below_the_largest_eigenvalue() -> None:
    generator = torch.Generator().manual_seed(0)
    for n in (1, 2, 8, 40):
        factor = torch.randn(50, n, n, generator=generator).double()
        decades = torch.empty(50, 1, n).uniform_(-8, 8, generator=generator).double()
        for a in (factor @ factor.mT, factor * 10**decades @ factor.mT / n, torch.eye(n).double().expand(50, n, n)):
            symmetric = (a @ a.mT) if not torch.allclose(a, a.mT) else a
            largest = torch.linalg.eigvalsh(symmetric)[..., -1]
            assert (eigenvalue_upper(symmetric) >= largest).all()
            assert (eigenvalue_upper(symmetric) <= largest * n ** (1 / 32) * (1 + 1e-9)).all()
    assert (eigenvalue_upper(torch.zeros(3, 4, 4).double()) == 0).all()


# errors that are easy to make -----------------------------------------------------------------------------------------


def score_change(case: Instance) -> Callable[[Tensor], Tensor]:
    """Return delta (K B, H, N, N) of z (K B, N, D)."""
    module: Any = case.module
    q, k, _ = module.projections(case.x)

    def delta(z: Tensor) -> Tensor:
        times = len(z) // len(case.x)
        q_z, k_z, _ = module.projections(z)
        return module.scale * (q_z @ k_z.mT - (q @ k.mT).repeat(times, 1, 1, 1))

    return delta


def test_seminorm_bounds_hold_and_their_parts_are_needed() -> None:
    """sqrt(sum w delta~^2) <= bound for w = p z, for all rows and for one; it fails without queries or keys."""
    excess: dict[str, list[Tensor]] = {"queries": [], "keys": []}
    for case in instances():
        core, delta = core_of(case), score_change(case)
        size = core.softmax.centred(core.values).norm(dim=-1)
        of_values, of_one_row = core.entry_seminorms(size)
        most = core.softmax.max_BHN

        def squares(x: Tensor, w: Tensor, core: JointCore = core, delta: Any = delta) -> Tensor:
            times = len(x) // IMAGES
            change = delta(x)
            centred = change - (core.p.repeat(times, 1, 1, 1) * change).sum(-1, keepdim=True)
            return (w.repeat(times, 1, 1, 1) * centred.square()).sum(-1)

        for w, bound in ((most[..., None] * core.p, core.row_seminorm(most)), (size * core.p, of_values)):

            def found(x: Tensor, w: Tensor = w, squares: Any = squares) -> Tensor:
                return squares(x, w).sum((-2, -1)).clamp_min(1e-300).sqrt()

            best = ascend(found, case.x, case.r_B, 40, 3)
            assert (best <= bound.at(same(case.r_B))).all()
            second = bound.second(same(case.r_B))
            excess["keys"].append(best / (case.r_B * bound.q + second))
            excess["queries"].append(best / (case.r_B * bound.k + second))

        def of_rows(x: Tensor, w: Tensor = size * core.p, squares: Any = squares) -> Tensor:
            return squares(x, w).amax((-2, -1)).clamp_min(1e-300).sqrt()

        allowed = of_one_row.at(same(case.r_B).of(2)).amax((-2, -1))
        assert (ascend(of_rows, case.x, case.r_B, 40, 3) <= allowed).all()
    for name, ratio in excess.items():
        assert torch.cat(ratio).max() > 1.02, f"a bound without the share of the {name}"


def test_tau_holds_and_is_nearly_attained() -> None:
    """max_ilk |delta~_ilk| <= tau(r)."""
    nearest = []
    for case in instances():
        core, delta = core_of(case), score_change(case)

        def found(x: Tensor, core: JointCore = core, delta: Any = delta) -> Tensor:
            change = delta(x)
            mean = (core.p.repeat(len(x) // IMAGES, 1, 1, 1) * change).sum(-1, keepdim=True)
            return (change - mean).abs().flatten(1).amax(1)

        nearest.append(ascend(found, case.x, case.r_B, 40, 6) / core.tau.at(same(case.r_B)))
    assert torch.cat(nearest).max() <= 1
    assert torch.cat(nearest).max() > 0.98


def test_the_second_order_of_the_scores_holds() -> None:
    """T1 bounds -<G, Q> for the quadratic part Q of delta.

    Q follows from delta(x + G) and delta(x - G) by the parallelogram identity.
    """
    nearest = []
    for case in instances():
        core, delta = core_of(case), score_change(case)
        weight = core.p * core.directional(split_heads(case.g, core.heads.o_HOD))[0]

        def found(x: Tensor, case: Instance = case, weight: Tensor = weight, delta: Any = delta) -> Tensor:
            times = len(x) // IMAGES
            quadratic = (delta(x) + delta(2 * case.x.repeat(times, 1, 1) - x)) / 2
            return -(weight.repeat(times, 1, 1, 1) * quadratic).sum((-3, -2, -1))

        t1 = remainder_of(case, core).terms(same(case.r_B))[0][0]
        nearest.append(ascend(found, case.x, case.r_B, 40, 3) / t1)
    assert torch.cat(nearest).max() <= 1
    assert torch.cat(nearest).max() > 0.4


def test_largest_of_capped_tokens_is_no_bound_of_their_sum() -> None:
    """min(quadratic, linear) does not grow like r^2, so the maximum over tokens bounds only one token.

    Tokens at 0 of a bounded normalisation of radius 1e-3 each lose almost all of their change, |R_i| ~ |G_i|.
    """
    tokens = 16
    module, r = SmoothProject(D, 1e-3), torch.ones(1).double()
    x = torch.zeros(1, tokens, D).double()
    one = 2 * float(r)  # ||R|| <= ||f(x + G) - f(x)|| + ||J G|| <= 2 r

    def dip(z: Tensor) -> Tensor:
        gradient = torch.ones_like(z) / D**0.5  # of length 1 in every token
        return (gradient * (z - module(z))).flatten(1).sum(1)

    assert ascend(dip, x, r, 20, 3).max() > 1.9 * one
    assert ascend(dip, x[:, :1], r, 20, 3).max() <= one
