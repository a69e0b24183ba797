"""Ascent attacks every second-order rule on at least 200 instances each.

An instance is a module with random weights, a clean input, a gradient and a radius. The table is enumerated: a rule
without a case in tests/tools/curvature_cases.py, or in attention_cases.py or attention_variants.py, fails the test.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.tools.curvature_cases import AFFINE, CASES, DERIVATIVES, FEW, HERE, IDENTITIES, D, N, instances
from tests.tools.expansions import Instance, largest_dip, largest_gain, ratios, report, tightness
from tests.tools.first_order_cases import CASES as FIRST_ORDER
from tests.tools.first_order_cases import SHAPES
from zoo.bounds.activations import Smooth, range_of_second
from zoo.bounds.curvature import affine, expansion_of, linear_part
from zoo.bounds.fused import eigenvalue_bound
from zoo.bounds.rule_table import NoRule, types_where
from zoo.bounds.torch_modules import GELU, SIGMOID, SILU, TANH, TANH_GELU, softplus
from zoo.layers.mlp import SLL, Mlp
from zoo.layers.monotone import MONOTONE_GELU
from zoo.layers.norms import LayerProject, SmoothProject
from zoo.primitives import PRIMITIVES


def test_every_rule_has_a_case() -> None:
    kinds = set(types_where(lambda rules: rules.expansion not in (None, affine))) - set(PRIMITIVES)
    assert {kind for kind in kinds if not kind.__module__.startswith("zoo.attention")} == set(CASES)
    assert set(types_where(lambda rules: rules.expansion is affine)) - set(PRIMITIVES) == {*AFFINE, *IDENTITIES}


@pytest.mark.parametrize(("kind", "i"), FEW, ids=lambda v: v.__name__ if isinstance(v, type) else str(v))
def test_no_ascent_beats_the_rule(kind: type[nn.Module], i: int) -> None:
    case = CASES[kind][i]
    found = tightness(instances(case, seed=0))
    report(f"{kind.__name__} {case.shape}", found)
    dip, size = found["remainder"], found["beta"]
    assert len(dip) > 40
    assert dip.median() <= case.remainder
    assert size.median() <= case.beta
    assert dip.min() <= 1 / 0.95, "the search is too weak to refute a remainder that is 5 % too small"


@pytest.mark.parametrize(("kind", "i"), FEW, ids=lambda v: v.__name__ if isinstance(v, type) else str(v))
def test_bounds_are_monotone_zero_at_zero_and_survive_infinity(kind: type[nn.Module], i: int) -> None:
    for instance in instances(CASES[kind][i], seed=1, modules=5):
        expansion, r_B = instance.expansion(), instance.r_B
        instance.g[0, 0] = 0  # without a gradient there is no remainder, even at infinity
        factors = torch.tensor([0.0, 1e-6, 0.1, 0.5, 1.0, 1.001, 1.5, 3.0, 1e3, 1e9]).double()
        r_FB = factors[:, None] * r_B
        remainder = expansion.remainder(instance.g)
        for values in (expansion.beta(r_FB), remainder(r_FB[:, None, :])):
            assert (values[1:] >= values[:-1] * (1 - 1e-12)).all()
            assert (values[0] == 0).all()
        assert torch.isinf(expansion.beta(torch.full_like(r_B, torch.inf))).all()
        at_infinity = remainder(torch.full_like(r_B, torch.inf)[None])
        assert (at_infinity >= remainder(r_FB[-1:])).all()
        assert at_infinity[0, 0] == 0
        # Radii for each class together, and one by one.
        of_classes = remainder(torch.stack([r_B, 2 * r_B]))
        torch.testing.assert_close(of_classes[0], remainder(r_B[None])[0], rtol=1e-12, atol=0)
        torch.testing.assert_close(of_classes[1], remainder(2 * r_B[None])[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize(("kind", "i"), HERE, ids=lambda v: v.__name__ if isinstance(v, type) else str(v))
def test_pull_is_the_transposed_jacobian(kind: type[nn.Module], i: int) -> None:
    for instance in instances(CASES[kind][i], seed=2, modules=2):
        for g, pulled in zip(instance.g, instance.expansion().pull(instance.g), strict=True):
            expected = torch.autograd.functional.vjp(instance.module, instance.x, g)[1]
            torch.testing.assert_close(pulled, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", AFFINE + IDENTITIES, ids=lambda kind: kind.__name__)
def test_affine_modules_have_no_remainder(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    make, _ = FIRST_ORDER[kind]
    module = make(1.5).double().eval().requires_grad_(False)
    x, v = (torch.randn(3, *SHAPES.get(kind, (5, 12))).double() for _ in range(2))
    instance = Instance(module, x, torch.randn(2, *module(x).shape).double(), torch.ones(3).double())
    expansion = instance.expansion()
    slope = torch.autograd.functional.jvp(module, x, v)[1]
    torch.testing.assert_close(module(x + v), module(x) + slope)
    gain = ratios(expansion.gain_B, largest_gain(instance), torch.ones(3))
    assert gain.max() < 1.2
    assert (expansion.beta(instance.r_B) == 0).all()
    assert (expansion.remainder(instance.g)(instance.r_B[None]) == 0).all()


# limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SmoothProject, nn.LayerNorm, Mlp], ids=lambda kind: kind.__name__)
def test_a_small_radius_gives_half_the_hessian(kind: type[nn.Module]) -> None:
    """For one token remainder / r^2 tends to half the most negative curvature of <g, f>.

    Norms bound its modulus, for the worst g.
    """
    torch.manual_seed(0)
    case = CASES[kind][0]
    for scale in (0.5, 1.0, 2.0):
        module = case.make(scale).double().eval().requires_grad_(False)
        x, g = torch.randn(1, 1, D).double(), torch.randn(200, 1, 1, D).double()
        radius = 1e-4
        bound_C = expansion_of(module)(x).remainder(g)(torch.tensor([[radius]]).double())[:, 0] / radius**2
        half_C = torch.stack([0.5 * _most_negative_curvature(module, x, one) for one in g])
        assert (bound_C >= half_C * (1 - 1e-6)).all()
        if kind is Mlp:
            assert (bound_C <= half_C.clamp_min(0) * 1.02 + 1e-3).all()


def _most_negative_curvature(module: nn.Module, x: Tensor, g: Tensor) -> Tensor:
    hessian = torch.autograd.functional.hessian(lambda z: (g[0] * module(z)).sum(), x).view(D, D)
    return -torch.linalg.eigvalsh(hessian)[0]


def test_the_curvature_of_the_norms_is_exact() -> None:
    """The largest second derivative over all u, v, c is 2 / (sqrt3 rt^2) R beyond R / sqrt2, 0.8586502 / R at R / 2."""
    u = torch.zeros(1, 1, D).double()
    for length, expected in ((2.0, 2 / math.sqrt(3) / (1 + 4)), (0.5, 0.858650104)):
        u[..., 0] = length
        best = torch.tensor(0.0).double()
        for angle in torch.linspace(0, math.pi, 400).double():
            g = torch.zeros(1, 1, D).double()
            g[..., 0], g[..., 1] = angle.cos(), angle.sin()
            best = torch.maximum(best, _most_negative_curvature(SmoothProject(D, 1.0), u, g))
        assert best == pytest.approx(expected, rel=1e-4)
        bound = expansion_of(SmoothProject(D, 1.0))(u).remainder(g[None])(torch.tensor([[1e-4]]).double())
        assert 2 * bound.item() / 1e-8 == pytest.approx(expected, rel=0.2)


# planted errors -------------------------------------------------------------------------------------------------------


def test_the_maximum_over_tokens_is_refuted_where_the_bound_is_linear() -> None:
    """Sharing r among tokens beats max_i |g_i| (r - k_i)_+ for LayerProject at its kink.

    It also beats the lemma on tokens applied to min(quadratic, linear) for SmoothProject
    (docs/proofs.md#tokenwise-trap).
    """
    torch.manual_seed(0)
    many, radius = 16, 1.0
    x = torch.nn.functional.normalize(torch.randn(1, many, D).double(), dim=-1) * (radius - 1e-3)
    instance = Instance(LayerProject(D, radius), x, x[None].clone(), torch.tensor([0.5]).double())
    expansion, found = instance.expansion(), largest_dip(instance)
    naive = x.norm(dim=-1).amax() * (0.5 - 1e-3)
    assert found.item() > 1.5 * naive
    assert found <= expansion.remainder(instance.g)(instance.r_B[None])

    x = torch.zeros(1, many, D).double()
    x[..., 0] = 0.5
    instance = Instance(SmoothProject(D, 1.0), x, torch.zeros(1, 1, many, D).double(), torch.tensor([4.0]).double())
    instance.g[..., 0] = 1.0
    capped = min(0.4293251 * 16, 4.0)  # for one token with the whole radius
    assert largest_dip(instance).item() > 1.2 * capped


HULLS = (GELU, TANH_GELU, TANH, SIGMOID, SILU, softplus(nn.Softplus(0.3, threshold=40)), MONOTONE_GELU)


@pytest.mark.parametrize("act", HULLS)
def test_hull_of_the_second_derivative_by_dense_sampling(act: Smooth) -> None:
    torch.manual_seed(0)
    z, reach = torch.randn(2000).double() * 3, 10 ** torch.empty(2000).uniform_(-4, 1).double()
    lo, hi = range_of_second(act, z, reach)
    points = act.second(z + reach * torch.linspace(-1, 1, 2001).double()[:, None])
    assert (lo <= points.amin(0)).all()
    assert (hi >= points.amax(0)).all()
    assert (points.amin(0) - lo).max() < 1e-4
    assert (hi - points.amax(0)).max() < 1e-4
    ends = torch.stack([act.second(z - reach), act.second(z + reach)])
    assert (ends.amax(0) < points.amax(0) - 1e-3).any(), "the ends alone would do: no test of the extrema"
    for far in (1e3, torch.inf):
        lo, hi = range_of_second(act, z, torch.full_like(z, far))
        assert (hi - lo).min() >= max(value for _, value in act.extrema) - min(value for _, value in act.extrema)


@pytest.mark.parametrize(("act", "module"), DERIVATIVES)
def test_derivatives_are_those_of_the_module(act: Smooth, module: nn.Module) -> None:
    z = torch.linspace(-12, 12, 8001).double().requires_grad_(True)
    (slope,) = torch.autograd.grad(module(z).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), z)
    torch.testing.assert_close(act.slope(z), slope, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(act.second(z), second, rtol=1e-9, atol=1e-11)
    least, most = act.slopes
    assert least <= slope.min() < least + 1e-3
    assert most - 1e-3 < slope.max() <= most
    for at, value in act.extrema:
        here = act.second(torch.tensor(at).double())
        assert 0 <= (value - here) * math.copysign(1, value) < 2e-10, "rounded outwards, by less than two units"


@pytest.mark.parametrize("kind", ["gaussian", "nonnegative", "negative", "zero", "one token"])
def test_eigenvalue_bound_is_never_below_and_one_percent_close(kind: str) -> None:
    torch.manual_seed(0)
    w_HD = torch.randn(30, D).double()
    c_PNH = torch.randn(40, 6, 30).double() * 10 ** torch.empty(40, 6, 1).uniform_(-3, 3).double()
    c_PNH = {
        "gaussian": c_PNH,
        "nonnegative": c_PNH.abs(),
        "negative": -c_PNH.abs(),
        "zero": 0 * c_PNH,
        "one token": c_PNH[:, :1],
    }[kind]
    bound = eigenvalue_bound(w_HD)(c_PNH)
    true = torch.linalg.eigvalsh((w_HD.mT * c_PNH[:, :, None]) @ w_HD)[..., -1].amax(1).clamp_min(0)
    assert (bound >= true).all()
    assert (bound <= 1.0101 * true + 1e-11 * c_PNH.abs().amax((1, 2)) * w_HD.square().sum()).all()
    assert (bound[c_PNH.amax((1, 2)) <= 0] == 0).all()


def test_eigenvalue_bound_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory for three matrices at a time the bound is the same."""
    torch.manual_seed(0)
    w_HD, c_PNH = torch.randn(30, D).double(), torch.randn(10, 7, 30).double()
    whole = eigenvalue_bound(w_HD)(c_PNH)
    monkeypatch.setattr("zoo.bounds.fused.FORM_BYTES", 3 * 8 * w_HD.numel())
    torch.testing.assert_close(eigenvalue_bound(w_HD)(c_PNH), whole, rtol=1e-12, atol=0)


def test_units_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few pairs at a time give the same result."""
    (instance,) = instances(CASES[Mlp][0], seed=3, modules=1)
    r = instance.r_B[None] * torch.tensor([1.0, 2.0]).double()[:, None, None]
    whole = instance.expansion().remainder(instance.g)(r), instance.expansion().beta(r[:, 0])
    monkeypatch.setattr("zoo.bounds.elementwise.PAIR_BYTES", 3 * 8 * N * 2 * D)
    pieces = instance.expansion().remainder(instance.g)(r), instance.expansion().beta(r[:, 0])
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=0)


def test_an_mlp_with_an_unknown_part_is_refused() -> None:
    with pytest.raises(NoRule, match="LogSigmoid"):
        expansion_of(Mlp(D, D, act_layer=nn.LogSigmoid))
    for unsound in (Mlp(D, D, act_layer=nn.Softplus), SLL(D, D, nn.Softplus), nn.Softplus(beta=2.0)):
        with pytest.raises(NoRule, match="jumps"):
            expansion_of(unsound)
    with pytest.raises(NoRule, match="GELU"):
        expansion_of(SLL(D, D, nn.GELU))
    with pytest.raises(NoRule, match="LayerNorm"):
        expansion_of(Mlp(D, D, norm_layer=nn.LayerNorm).requires_grad_(False))


@pytest.mark.parametrize("bias", [0.0, 1.0, 1e100])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e30, 1e300])
def test_the_linear_part_of_any_vector(size: float, bias: float) -> None:
    """This includes vectors without an offset, where no finite scale fits both."""
    weight = torch.randn(3, 4, dtype=torch.float64)
    v = size * torch.randn(2, 1, 4, dtype=torch.float64)
    push = linear_part(lambda x: x @ weight.mT + bias, torch.zeros(1, 4, dtype=torch.float64))
    torch.testing.assert_close(push(v), v @ weight.mT, rtol=1e-12, atol=1e-14 * size)


@pytest.mark.parametrize("size", [torch.inf, torch.nan])
def test_the_linear_part_of_no_number_is_none(size: float) -> None:
    """An overflow stays unknown."""
    push = linear_part(lambda x: 2 * x, torch.zeros(1, 4, dtype=torch.float64))
    assert not push(torch.full((1, 1, 4), size, dtype=torch.float64)).isfinite().any()


@pytest.mark.parametrize("other", [1e-25, 1e25, torch.inf, torch.nan])
def test_a_linear_part_is_a_vectors_own_whatever_its_neighbours_are(other: float) -> None:
    weight, v = torch.randn(3, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    push = linear_part(lambda x: x @ weight.mT + 1, torch.zeros(3, 4, dtype=torch.float64))
    mixed = v.clone()
    mixed[0] *= other
    mixed[1, 0] *= other
    torch.testing.assert_close(push(mixed)[1, 1:], (v @ weight.mT)[1, 1:])


def test_an_sll_layer_whose_diagonal_cancels_is_refused() -> None:
    """Two columns of W are nearly orthogonal, a large q_j / q_i multiplies their product, and float64 loses it."""
    layer = SLL(D, 2, nn.ReLU).double()
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[:3, 0] = torch.tensor([2.0**40, 1.0, -(2.0**40)])
        layer.weight[:3, 1] = torch.tensor([2.0**20, 1.0, 2.0**20])
        layer.log_q[1] = 60.0
    exact = 2.0**81 + 1 + math.exp(60.0)  # of T_00; the product of the two columns is 1
    assert float(layer.diagonal_H()[0]) < exact / 10
    with pytest.raises(NoRule, match="T is a sum that cancels"):
        expansion_of(layer)
