"""Second-order rules of other attention: distances, cosines, normalised scores; plain, windowed and gated.

Ascent attacks at least 200 instances of each. Letters: B images, C gradients, N tokens, D width, H heads.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tools.ascent import ascend, largest_change
from tests.tools.attention_variants import CASES, INPUTS, D, H, N, instances, random_
from tests.tools.cases import mostly_slow
from tests.tools.expansions import Instance, largest_dip, largest_gain, largest_remainder, ratios, report, tightness
from zoo import create_model
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.gpsa import GPSA
from zoo.attention.l2 import L2Attention
from zoo.attention.lipschitz_norm import SMALLEST_C, _Quotient
from zoo.attention.softmax.qkv import AttentionBounds
from zoo.attention.theory.core import QKVRadii, Score
from zoo.attention.theory.separate import SeparateCore
from zoo.attention.window import WindowAttention
from zoo.bounds.contracts import Expansion
from zoo.bounds.curvature import composition, nodes_of
from zoo.bounds.first_order import layer_of
from zoo.bounds.rule_table import NoRule
from zoo.models.swin import InWindows


@pytest.mark.parametrize("kind", mostly_slow(CASES, "scsa"))
def test_no_ascent_beats_remainder_beta_or_gain(kind: str) -> None:
    found = tightness(instances(kind), steps=20, starts=2)
    report(kind, found)
    dip, most = found["remainder"], found["beta"]
    _, remainder, beta = CASES[kind]
    assert len(most) > 100
    assert dip.median() < remainder
    assert most.median() < beta


@pytest.mark.parametrize("kind", mostly_slow(CASES, "l2", "ln"))
def test_no_ascent_beats_the_local_rule(kind: str) -> None:
    found = []
    for case in instances(kind):
        y, bound = layer_of(case.module, local=True)(case.x)
        torch.testing.assert_close(y, case.module(case.x))
        found.append(bound(case.r_B) / largest_change(case.module, case.x, case.r_B, 20, 2))
    ratio = torch.cat(found)
    print(f"radius of {kind}: {len(ratio)} instances, least {ratio.min():.2f}, median {ratio.median():.2f}")
    assert ratio.min() >= 1 - 1e-9
    assert ratio.min() < 2.5


@pytest.mark.parametrize("kind", mostly_slow(CASES, "l2", "ln"))
def test_bounds_are_monotone_and_survive_zero_and_infinity(kind: str) -> None:
    for case in instances(kind, modules=5):
        expansion = case.expansion()
        change = layer_of(case.module, local=True)(case.x)[1]
        remainder = expansion.remainder(case.g)
        for bound in (change, expansion.beta, lambda r: remainder(r.unsqueeze(-2))):  # noqa: B023
            factors = (0.0, 1e-9, 1e-3, 0.1, 1.0, 1.001, 2.0, 10.0, 1e3, 1e200, math.inf)
            values = torch.stack([bound(case.r_B * factor) for factor in factors])
            assert (values[1:] >= values[:-1] * (1 - 1e-12)).all()
            assert (values[0] == 0).all()
            assert not torch.isnan(values).any()
            assert torch.isinf(values[-1]).all()
            stacked = bound(torch.stack([case.r_B, 2 * case.r_B]))
            torch.testing.assert_close(stacked, torch.stack([values[4], values[6]]))


@pytest.mark.parametrize("kind", CASES)
def test_pull_is_the_transpose_of_the_jacobian(kind: str) -> None:
    for case in instances(kind, modules=4):
        x = case.x.clone().requires_grad_(True)
        (expected,) = torch.autograd.grad((case.module(x) * case.g[0]).sum(), x)
        torch.testing.assert_close(case.expansion().pull(case.g)[0], expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", CASES)
def test_remainders_are_of_second_order(kind: str) -> None:
    """A tenth of the radius leaves about a hundredth, so only rounding is of first order."""
    for case in instances(kind, modules=5):
        expansion = case.expansion()
        small = 1e-5 * case.x.flatten(1).norm(dim=1)
        for bound in (expansion.beta, lambda r: expansion.remainder(case.g)(r[None])[0]):  # noqa: B023
            ratio = bound(small) / bound(small / 10)
            assert (ratio > 90).float().mean() > 0.8, ratio


@pytest.mark.parametrize("kind", CASES)
def test_bounds_of_one_window_are_superhomogeneous(kind: str) -> None:
    """No ratio falls with r: beta / r, remainder / r^2, radius / r, cost of rounding / r.

    Joining windows relies on this.
    """
    for case in instances(kind, modules=5):
        if isinstance(case.module, WindowAttention | GPSA):
            return
        whole = AttentionBounds(case.module, case.module)
        (expansion, off), (_, change) = whole.expand_apart(case.x), whole.layer(case.x)
        t = torch.logspace(-3, 3, 61).double()[:, None]
        r = t * case.r_B
        bounds = (
            change(r) / t,
            off(r) / t,
            expansion.beta(r) / t,
            expansion.remainder(case.g)(r[:, None])[:, 0] / t**2,
        )
        for values in bounds:
            assert (values[1:] >= values[:-1] * (1 - 1e-9)).all()


# the core alone ---------------------------------------------------------------------------------------------------


def core_of(bounds: AttentionBounds, x: Tensor) -> SeparateCore:
    return bounds.core(bounds.split.transform(bounds.split.project(x)))


def scores(score: Score, q: Tensor, k: Tensor) -> Tensor:
    return score.s * (q @ k.mT - score.kappa / 2 * k.square().sum(-1).unsqueeze(-2))


@pytest.mark.parametrize("kappa", [0.0, 1.0])
def test_no_ascent_beats_a_form_of_the_core(kappa: float) -> None:
    """Test each bound of ||R|| and -<o, R> alone, with independent q, k and v and heads of unequal gain."""
    found: dict[str, list[Tensor]] = {}
    torch.manual_seed(0)
    score = Score(0.5, kappa)
    for i in range(9):
        qkv = torch.randn(INPUTS, 3, H, N, D // H).double() * 2.0 ** (i % 5 - 2)
        gain_H = torch.rand(H).double()
        gain = gain_H[:, None, None]
        q, k, v = qkv.unbind(1)
        p = scores(score, q, k).softmax(-1)
        core = SeparateCore(score, q, k, v, p, gain * p, gain_H)
        r_B3 = torch.rand(INPUTS, 3).double() * qkv.flatten(1).norm(dim=1, keepdim=True)
        r_B3 = r_B3 * 10 ** torch.empty(INPUTS, 1).uniform_(-3, 0).double()
        o = torch.randn(1, *q.shape).double()

        def rest(
            z: Tensor, qkv: Tensor = qkv, r_B3: Tensor = r_B3, p: Tensor = p, gain: Tensor = gain, score: Score = score
        ) -> Tensor:
            """Return R for qkv + eta with |eta| <= r, each part in its own ball."""
            many = len(z) // INPUTS
            qkv, p = qkv.repeat(many, 1, 1, 1, 1), p.repeat(many, 1, 1, 1)
            eta = z - qkv
            length = eta.flatten(2).norm(dim=-1).clamp_min(1e-300)
            eta = eta * (r_B3.repeat(many, 1) / length).clamp_max(1)[..., None, None, None]
            (q, k, v), (q_eta, k_eta, v_eta) = qkv.unbind(1), eta.unbind(1)
            ds = q_eta @ k.mT + q @ k_eta.mT - score.kappa * (k * k_eta).sum(-1).unsqueeze(-2)
            dp = score.s * p * (ds - (p * ds).sum(-1, keepdim=True))
            moved = scores(score, q + q_eta, k + k_eta).softmax(-1) @ (v + v_eta)
            return gain * (moved - p @ v - dp @ v - p @ v_eta)

        def dip(z: Tensor, o: Tensor = o, rest: Any = rest) -> Tensor:
            return -(o[0].repeat(len(z) // INPUTS, 1, 1, 1) * rest(z)).flatten(1).sum(1)

        def size(z: Tensor, rest: Any = rest) -> Tensor:
            return rest(z).flatten(1).norm(dim=1)

        r, radius = QKVRadii(*r_B3.unbind(1)), r_B3.norm(dim=1)
        largest = ascend(size, qkv, radius, 30, 3)
        deepest = ascend(dip, qkv, radius, 30, 3)
        size_B, o_B = radius + (p @ v).flatten(1).norm(dim=1), o.flatten(2).norm(dim=2)[0]
        for name, bound in core.beta_forms(r).items():
            found.setdefault(f"beta {name}", []).append(ratios(bound, largest, size_B))
        t1, t2, t3 = core.remainder(o).terms(r)
        for name in t2:
            whole = (t1 + t2[name] + t3[name])[0]
            found.setdefault(f"remainder {name}", []).append(ratios(whole, deepest, o_B * size_B))
    report(f"core, kappa {kappa}", {name: torch.cat(values) for name, values in found.items()})
    assert len(found) == 5
    for name, values in found.items():
        assert torch.cat(values).min() < (4 if name == "beta difference" else 1.6), name


@pytest.mark.parametrize("kind", mostly_slow(("dp", "l2 untied"), "l2 untied"))
def test_seminorm_bounds_and_tau_of_the_core(kind: str) -> None:
    """Check max |delta~| <= tau, the seminorm bound, and T1, with q, k and v moving independently.

    The seminorm is sqrt(sum w p delta~^2). T1 = -<G, Q>, with Q from delta by the parallelogram identity. All bounds
    are attained up to a few percent.
    """
    nearest: dict[str, list[Tensor]] = {"tau": [], "seminorm": [], "t1": []}
    torch.manual_seed(0)
    for i in range(6):
        made = DotProductAttention(D, H) if kind == "dp" else L2Attention(D, H, tied=False)
        module = random_(made, 2.0 ** (i % 5 - 2))
        x = torch.randn(INPUTS, N, D).double()
        core = core_of(AttentionBounds(module, module), x)
        score = core.score
        qk = torch.stack([core.q, core.k], 1)
        radius = qk.flatten(1).norm(dim=1) * 10 ** torch.empty(INPUTS).uniform_(-2, 0.5).double()
        share = torch.rand(INPUTS).double()
        sizes = torch.stack([share.sqrt(), (1 - share).sqrt()], 1).view(INPUTS, 2, 1, 1, 1)
        r = QKVRadii(radius * share.sqrt(), radius * (1 - share).sqrt(), torch.zeros(INPUTS).double())

        def delta(
            z: Tensor, core: SeparateCore = core, qk: Tensor = qk, sizes: Tensor = sizes, score: Any = score
        ) -> Tensor:
            """Return the change of scores for z = qk + eta with |eta| <= r, each part put into its own ball."""
            many = len(z) // INPUTS
            eta = z - qk.repeat(many, 1, 1, 1, 1)
            length = eta.flatten(2).norm(dim=-1).view(len(eta), 2, 1, 1, 1).clamp_min(1e-300)
            whole = eta.flatten(1).norm(dim=1).view(-1, 1, 1, 1, 1)
            eta = eta / length * torch.minimum(length, whole * sizes.repeat(many, 1, 1, 1, 1))
            q, k = (qk.repeat(many, 1, 1, 1, 1) + eta).unbind(1)
            change = scores(score, q, k) - scores(score, core.q, core.k).repeat(many, 1, 1, 1)
            return change - (core.p.repeat(many, 1, 1, 1) * change).sum(-1, keepdim=True)

        w = torch.rand(INPUTS, H, N).double()
        w_p = w.unsqueeze(-1) * core.p

        def weighted(z: Tensor, w_p: Tensor = w_p, delta: Any = delta) -> Tensor:
            square = w_p.repeat(len(z) // INPUTS, 1, 1, 1) * delta(z).square()
            return square.flatten(1).sum(1).add(1e-300).sqrt()

        def largest(z: Tensor, delta: Any = delta) -> Tensor:
            return delta(z).abs().flatten(1).amax(1)

        found_tau = ascend(largest, qk, radius, 40, 3)
        found = ascend(weighted, qk, radius, 40, 3)
        o = torch.randn(1, *core.q.shape).double()
        slope, t1 = core.p * core.directional(o)[0], core.remainder(o).terms(r)[0][0]

        def dip(z: Tensor, slope: Tensor = slope, delta: Any = delta, qk: Tensor = qk) -> Tensor:
            many = len(z) // INPUTS
            quadratic = (delta(z) + delta(2 * qk.repeat(many, 1, 1, 1, 1) - z)) / 2
            return -(slope.repeat(many, 1, 1, 1) * quadratic).flatten(1).sum(1)

        nearest["t1"].append(ascend(dip, qk, radius, 40, 3) / t1)
        nearest["tau"].append(found_tau / core.tau.at(r))
        nearest["seminorm"].append(found / core.row_seminorm(w).at(r))
    for name, values in nearest.items():
        ratio = torch.cat(values)
        print(f"{kind} {name}: nearest {ratio.max():.3f}, median {ratio.median():.3f}")
        assert ratio.max() <= 1 + 1e-9
        assert ratio.max() > 0.95


# swin -----------------------------------------------------------------------------------------------------------------


def swin_blocks(attention: str, scale: float) -> Any:
    """Return a plain and a shifted block on 3 x 3 tokens of width 2 D, with padded windows of 2 x 2."""
    model = create_model(
        "dp_swin_t", img_size=20, window_size=2, embed_dim=D, depths=(1, 2), num_heads=(H, H), norm="smoothproject",
        attention=attention,
    )  # fmt: skip
    stage = model.get_submodule("layers.1")
    random_(stage, scale)
    return stage


def attended(block: Any) -> nn.Module:
    """Return the attention of a block as a map of its tokens."""

    class Attended(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return block._attn(x)

    return Attended()


def expanded(module: nn.Module, x: Tensor, expansion: Expansion, g: Tensor, r_B: Tensor) -> Any:
    class Case(Instance):
        def expansion(self) -> Expansion:
            return expansion

    return Case(module, x, g, r_B)


@pytest.mark.parametrize(
    ("attention", "remainder", "beta"),
    mostly_slow((("dp", 40, 50), ("l2", 60, 60), ("scsa", 300, 200), ("ln", 300, 700)), ("l2", 60, 60)),
)
@pytest.mark.slow
def test_windows_of_a_swin_block_share_the_radius(attention: str, remainder: float, beta: float) -> None:
    dips, mosts, changes = [], [], []
    torch.manual_seed(1)
    for i in range(5):
        block = swin_blocks(attention, 2.0 ** (i % 3 - 1)).blocks[i % 2]
        x = torch.randn(44, 3, 3, 2 * D).double() * 10 ** torch.empty(44, 1, 1, 1).uniform_(-1, 0.7).double()
        x = x * 10 ** torch.empty(1, 3, 3, 1).uniform_(-1, 0.3).double()  # windows that differ
        r_B = x.flatten(1).norm(dim=1) * 10 ** torch.empty(44).uniform_(-3.5, -1).double()
        g = torch.randn(1, *x.shape).double()
        expansion = InWindows(block).expansion()(x)
        case = expanded(attended(block), x, expansion, g, r_B)
        size_B = case.size_B()
        torch.testing.assert_close(expansion.y, case.module(x))
        g_B = g.flatten(2).norm(dim=2)[0]
        dips.append(ratios(expansion.remainder(g)(r_B[None])[0], largest_dip(case, 14, 2)[0], g_B * size_B))
        mosts.append(ratios(expansion.beta(r_B), largest_remainder(case, 14, 2), size_B))
        ratios(expansion.gain_B, largest_gain(case, 10), torch.ones_like(size_B))
        change = InWindows(block).layer(local=True)(x)[1](r_B)
        changes.append(change / largest_change(case.module, x, r_B, 15, 2))
        assert (change <= InWindows(block).layer(local=False)(x)[1](r_B) * (1 + 1e-9)).all()
    dip, most, change = torch.cat(dips), torch.cat(mosts), torch.cat(changes)
    print(
        f"swin {attention}: remainder {dip.min():.2f} median {dip.median():.2f}, beta {most.min():.2f} median "
        f"{most.median():.2f}, radius {change.min():.2f} median {change.median():.2f}"
    )
    assert change.min() >= 1 - 1e-9
    assert dip.median() < remainder
    assert most.median() < beta


def test_the_nodes_of_a_swin_stage_are_the_stage() -> None:
    torch.manual_seed(2)
    stage = swin_blocks("l2", 1.0)
    x, g = torch.randn(3, 5, 5, D).double(), torch.randn(2, 3, 3, 3, 2 * D).double()
    chain = composition(nodes_of(stage))
    expansion = chain(x)
    torch.testing.assert_close(expansion.y, stage(x))
    for one, pulled in zip(g, expansion.pull(g), strict=True):
        torch.testing.assert_close(pulled, torch.autograd.functional.vjp(stage, x, one)[1])


def test_an_untied_l2_has_local_rules_only() -> None:
    module = random_(L2Attention(D, H, tied=False), 1.0)
    with pytest.raises(NoRule, match="Lipschitz"):
        layer_of(module)
    layer_of(module, local=True)


@pytest.mark.parametrize("share", [1.001, 1.5, 10.0])
def test_nothing_is_known_of_a_quotient_that_may_be_held(share: float) -> None:
    """With c' = max(its products, SMALLEST_C), ignoring the max breaks the bound of the remainder of 1 / c."""
    c, still = share * SMALLEST_C, torch.zeros(1).double()
    rows = c**0.5 * torch.tensor([1.0, 1.0, 0.5]).double().view(3, 1, 1, 1, 1)
    quotient = _Quotient(rows)
    for part in torch.linspace(0.001, 0.5, 50).tolist():
        r = QKVRadii(still, torch.full((1,), part * c**0.5).double(), still)  # the key shrinks by the whole change
        exact = abs(1 / max(SMALLEST_C, c * (1 - part)) - 1 / c - part / c)
        assert exact <= float(quotient.nonlinear(r, superhomogeneous=True)) * (1 + 1e-9)
        assert exact <= float(quotient.nonlinear(r, superhomogeneous=False)) * (1 + 1e-9)
