"""Rounding of products with Jacobians and forms: in float32 it never exceeds the claim, in units of that type."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from certify.shared.bake import bake
from certizoo import UserError
from tests.tools.attention_cores import SCORES, case_of
from tests.tools.cases import mostly_slow
from tests.tools.covered_models import COVERED, QUICK
from tests.tools.curvature_cases import CASES, instances
from tests.tools.in_float32 import UNITS, InFloat32, in_float32, rounded_by
from zoo.arithmetic import OUT, U, broadcast_batch, gamma
from zoo.attention.softmax.parts import CoreLeafForms, core_leaf
from zoo.attention.theory.separate import SeparateCore
from zoo.bounds import torch_modules
from zoo.bounds.activations import lipschitz
from zoo.bounds.contracts import Expansion, Forms
from zoo.bounds.curvature import expansion_of, linear_part, pullback, trunk_of
from zoo.bounds.elementwise import UnitForms
from zoo.bounds.products import SLOPE, Shares, affine_rounding, chained, matrix_rounding
from zoo.bounds.tape import Tape
from zoo.layers.convolution import CellConv2d, CircularConv2d
from zoo.layers.norm_forms import NormForms
from zoo.layers.norms import CenterNorm
from zoo.layers.patches import Normalize
from zoo.models.factory import model_options
from zoo.models.overview import tiny_options
from zoo.spectral import absolute_norm

ROWS, CLIMBS = 12, 3
Map = Callable[[Tensor], Tensor]
AFFINE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(12, 20), (3, 12)),
    "no bias": (lambda: nn.Linear(12, 5, bias=False), (12,)),
    "flat": (lambda: nn.Flatten(), (2, 3)),
    "centre": (lambda: CenterNorm(8), (3, 8)),
    "strided": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), (3, 6, 6)),
    "bare": (lambda: nn.Conv2d(4, 3, 2, bias=False), (4, 5, 5)),
    "cells": (lambda: CellConv2d(3, 6, 4, stride=2, padding=1), (3, 8, 8)),
    "around": (lambda: CircularConv2d(3, 4, (3, 3)), (3, 5, 6)),
    "normalize": (lambda: Normalize((0.4, 0.5), (0.25, 0.01)), (2, 4, 4)),
}


def share(f: Map, transposed: Map, x: Tensor, claim_B: Tensor) -> float:
    """Return the largest |fl(J v) - J v| / (claim |v|) that is found, for x (B, ...) like v.

    The vectors are random ones, random ones of one sign, the signs of rows of J, for which nothing cancels in |J| |v|,
    and random ones around the worst of them.
    """
    random = torch.Generator().manual_seed(0)
    v = torch.randn(ROWS, *x.shape, generator=random, dtype=torch.float64)
    y = f(v)
    rows = transposed(torch.randn(ROWS, *y.shape[1:], generator=random, dtype=torch.float64))
    one = torch.zeros(ROWS, *y.shape[1:], dtype=torch.float64)
    at = torch.randint(y[0, 0].numel(), (ROWS,), generator=random)
    one.flatten(2)[torch.arange(ROWS), :, at] = 1.0
    v = torch.cat([v, v.abs(), rows, rows.sign(), transposed(one), transposed(one).sign()])
    most = 0.0
    for _ in range(CLIMBS):
        v = in_float32(v)
        off_CB, length_CB = (t.flatten(2).norm(dim=-1) for t in (rounded_by(f, v), v))
        found_CB = (off_CB / (claim_B * UNITS * length_CB)).nan_to_num(0.0, torch.inf)
        most = max(most, float(found_CB.max()))
        best = v[found_CB.argmax(0), torch.arange(len(x))]
        v = best * (1 + 0.1 * torch.randn(6 * ROWS, *x.shape, generator=random, dtype=torch.float64))
    return most


def of_expansion(expansion: Expansion) -> float:
    x, rounding_B = expansion.pull(expansion.y[None])[0], expansion.rounding
    there = share(expansion.push, expansion.pull, x, rounding_B)
    if expansion.own_gram is not None:
        both_B = 3 * rounding_B * (expansion.gain_B + rounding_B)
        there = max(there, share(expansion.gram, expansion.gram, expansion.y, both_B))
    return max(there, share(expansion.pull, expansion.push, expansion.y, rounding_B))


@pytest.mark.parametrize("kind", AFFINE)
def test_affine_modules_round_no_more_than_is_said(kind: str) -> None:
    torch.manual_seed(0)
    make, shape = AFFINE[kind]
    module = make().double().eval().requires_grad_(False)
    found = of_expansion(expansion_of(module)(torch.rand(2, *shape, dtype=torch.float64)))
    assert found <= 1
    assert found > 1e-3 or kind == "flat", "too loose to notice a bound that is wrong"


@pytest.mark.parametrize(
    ("kind", "i"), [(kind, i) for kind, cases in CASES.items() for i in range(len(cases))], ids=str
)
def test_modules_that_bend_round_no_more_than_is_said(kind: type[nn.Module], i: int) -> None:
    for instance in instances(CASES[kind][i], seed=2, modules=3):
        expansion = instance.expansion()
        assert of_expansion(expansion) <= 1
        assert expansion.forms is not None
        assert of_forms(expansion, expansion.forms) <= 1


@pytest.mark.parametrize("name", mostly_slow(COVERED, *QUICK))
def test_leaves_and_nodes_of_the_zoo_round_no_more_than_is_said(name: str) -> None:
    """Check their forms too."""
    found = list[float]()
    for expansion in expansions(name):
        nodes = [expansion] if bool(torch.isfinite(expansion.rounding).all()) else []
        leaves = list(Tape([expansion]).leaves.values())
        assert all(bool(torch.isfinite(leaf.rounding).all()) for leaf in leaves)
        found += [of_expansion(one) for one in (*nodes, *leaves)]
        found += [of_forms(leaf, leaf.forms) for leaf in leaves if leaf.forms is not None]
    assert max(found) <= 1
    assert max(found) > 1e-3


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("score", SCORES)
def test_cores_with_offsets_round_no_more_than_is_said(score: str, offset: float) -> None:
    """All tokens share a part of their keys, queries and values, to which changes of scores are blind."""
    random = torch.Generator().manual_seed(0)
    of, plain = SCORES[score], case_of(SCORES[score]).core
    q, k, v = (
        one + offset * torch.randn(1, one.shape[1], 1, one.shape[-1], generator=random, dtype=torch.float64)
        for one in (plain.q, plain.k, plain.values)
    )
    core = SeparateCore(of, k if of.tied else q, k, v, plain.p, plain.mixed, plain.gain_H)
    leaf = core_leaf(core, v)
    assert leaf.forms is not None
    found = [of_expansion(leaf), *(of_forms(leaf, leaf.forms, reach) for reach in (1e-3, 0.3, 30.0))]
    assert max(found) <= 1


def expansions(name: str) -> Iterator[Expansion]:
    """Return the expansions of all nodes of a model of the zoo, shrunk."""
    options = model_options(name, **tiny_options(name))
    torch.manual_seed(0)
    model = bake(zoo.create_model(name, **tiny_options(name)).eval())
    x = torch.rand(2, options["in_chans"], options["img_size"], options["img_size"], dtype=torch.float64)
    with torch.no_grad():
        for _, expand in trunk_of(model)[0]:
            expansion = expand(x)
            yield expansion
            x = expansion.y


def of_forms(leaf: Expansion, forms: Forms, radius: float = 0.05) -> float:
    """Return the same for its quadratic forms within this radius, its functionals, and B."""
    x = leaf.pull(leaf.y[None])[0]
    room_B = torch.ones_like(leaf.gain_B)
    squares = forms.squares(x[None])
    reach = (radius * forms.sizes * broadcast_batch(room_B, squares.shape[1:])).expand(squares.shape)
    random = torch.Generator().manual_seed(1)
    g = torch.randn(1, *leaf.y.shape, generator=random, dtype=torch.float64)
    r = torch.zeros_like(forms.collect(leaf.y[None])[0])
    found = [functionals(forms, x)]
    for form in (forms.of_gradient(g, reach), forms.of_rest(reach, torch.ones_like(r))):
        rounding = torch.as_tensor(form.rounding, dtype=torch.float64).expand(form.largest.shape)
        if bool((form.largest < 1e30).all()):
            found.append(share(form.apply, form.apply, x, rounding[0]))
    rounding_B = forms.spread_rounding * room_B
    found.append(share(forms.spread, forms.collect, r, rounding_B))
    return max(found[-1], share(forms.collect, forms.spread, leaf.y, rounding_B), *found)


def functionals(forms: Forms, x: Tensor) -> float:
    """Bound |<a, v>| by its square, which torch rounds by a few more units, where there is an a."""
    random, most = torch.Generator().manual_seed(2), 0.0
    for _ in range(4):
        v = in_float32(torch.randn(1, *x.shape, generator=random, dtype=torch.float64))
        exact = forms.squares(v).sqrt()
        with InFloat32():
            squares = forms.squares(v)
        known = torch.isfinite(exact)
        off = torch.where(known, squares.sqrt() - exact, 0.0).abs() - 4 * U * UNITS * torch.where(known, exact, 0.0)
        length = broadcast_batch(v[0].flatten(1).norm(dim=1), exact.shape[1:])
        most = max(most, float((off.clamp_min(0) / (forms.slack * UNITS * length)).nan_to_num(0.0, torch.inf).max()))
    return most


def test_every_kind_of_forms_is_tried() -> None:
    kinds = {type(leaf.forms) for name in QUICK for node in expansions(name) for leaf in Tape([node]).leaves.values()}
    for kind in (UnitForms, NormForms, CoreLeafForms):
        assert any(issubclass(one, kind) for one in kinds)


@pytest.mark.parametrize("name", ["GELU", "TANH_GELU", "TANH", "SIGMOID", "SILU"])
def test_slopes_are_off_by_no_more_than_is_said(name: str) -> None:
    activation = getattr(torch_modules, name)
    z = in_float32(torch.cat([torch.linspace(-30, 30, 20001), torch.linspace(-1e-3, 1e-3, 2001)]).double())
    off = rounded_by(activation.slope, z).abs().max()
    assert 0 < off <= SLOPE * lipschitz(activation) * UNITS


@pytest.mark.hostile
def test_weights_that_cancel_round_what_they_are_made_of() -> None:
    """W_2 W_1 = 1 through 2^40 and -2^40, within one module and across two; the loss is found."""
    torch.manual_seed(0)
    w, huge = torch.randn(12, 8, dtype=torch.float64), 2.0**40
    first, second = nn.Linear(8, 24).double(), nn.Linear(24, 12).double()
    with torch.no_grad():
        first.weight.copy_(torch.cat([w, w + w / 3]))
        second.weight.copy_(torch.cat([4 * huge * torch.eye(12), -3 * huge * torch.eye(12)], 1))
    x, both = torch.rand(2, 8, dtype=torch.float64), nn.Sequential(first, second).requires_grad_(False)
    parts = [expansion_of(first)(x)]
    parts.append(expansion_of(second)(parts[0].y))

    def push(v: Tensor) -> Tensor:
        return parts[1].push(parts[0].push(v))

    def pull(g: Tensor) -> Tensor:
        return parts[0].pull(parts[1].pull(g))

    norm = torch.linalg.matrix_norm(push(torch.eye(8, dtype=torch.float64)[:, None].expand(-1, 2, -1))[:, 0], 2)
    assert norm < 1e-3 * huge, "nothing cancels"
    joined_B, whole = chained(parts), affine_rounding(both, pullback(both, x[:1]), x[:1])
    for claim_B in (joined_B, torch.full_like(joined_B, whole)):
        for found in (share(push, pull, x, claim_B), share(pull, push, parts[1].y, claim_B)):
            assert 1e-3 < found <= 1
        assert (claim_B > 0.1 * U * huge).all()


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e6])
def test_constants_that_cancel_count(offset: float) -> None:
    """A large c makes f(0) small in x W + c - c."""
    torch.manual_seed(0)
    w, c = torch.randn(8, 8, dtype=torch.float64), offset * torch.rand(8, dtype=torch.float64)
    x = torch.zeros(2, 8, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return x @ w + c - (c + 1e-3 * offset)

    claim = affine_rounding(f, pullback(f, x[:1]), x[:1])
    assert share(linear_part(f, x), pullback(f, x), x, torch.full((2,), claim, dtype=torch.float64)) <= 1
    assert not offset or claim > affine_rounding(lambda x: x @ w, pullback(lambda x: x @ w, x[:1]), x[:1])


def test_the_rounding_of_a_matrix_is_gamma_times_its_absolute_values() -> None:
    """By hand: for a product of two matrices gammas add and absolute values multiply."""
    w = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, -6.0]], dtype=torch.float64)
    x = torch.rand(1, 3, dtype=torch.float64)
    assert float(absolute_norm(w)) == pytest.approx(91**0.5, rel=1e-8), "Frobenius"
    assert float(absolute_norm(torch.ones(2, 8).double())) == pytest.approx(4.0, rel=1e-8), "both"
    assert float(absolute_norm(torch.eye(8).double())) == pytest.approx(1.0, rel=1e-8), "rows and columns"
    assert float(matrix_rounding(w)) == pytest.approx(gamma(5) * 91**0.5, rel=1e-8)
    one = affine_rounding(lambda x: x @ w.mT, lambda g: g @ w, x)
    assert one == pytest.approx((gamma(5) + 4 * U) * (15 * 9) ** 0.5, rel=1e-8)
    two = affine_rounding(lambda x: x @ w.mT @ w, lambda g: g @ w.mT @ w, x)
    most = (w.abs().mT @ w.abs()).sum(1).max()
    assert two == pytest.approx((gamma(5) + gamma(4) + 4 * U) * float(most), rel=1e-8)
    bound, norm = OUT * float(absolute_norm(w)), torch.linalg.matrix_norm(w.abs(), 2)
    assert norm <= bound


def test_shares_add_up_and_sizes_do_not_cancel() -> None:
    w = torch.rand(3, 3, dtype=torch.float64)
    x = torch.ones(1, 3, dtype=torch.float64)
    with Shares() as shares:
        y = x @ w
        found = shares.of(y - y)
    assert float(found.value.abs().max()) == 0.0
    torch.testing.assert_close(found.size, 2 * x @ w)
    assert shares.share == pytest.approx(gamma(5) + 2 * U, rel=1e-9)
    with Shares() as shares:
        _ = x @ w
        _ = x @ w
    assert shares.share == pytest.approx(2 * gamma(5), rel=1e-9)


@pytest.mark.hostile
@pytest.mark.parametrize(
    "f", [torch.sin, torch.fft.fft, lambda x: x.float().double() * 1.0 + x.float()], ids=["sin", "fft", "float32"]
)
def test_unknown_operations_are_refused(f: Any) -> None:
    x = torch.ones(1, 3, dtype=torch.float64)
    with pytest.raises(UserError):
        affine_rounding(f, partial(torch.mul, x), x)


def test_a_bound_that_is_too_small_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bound is one unit for a sum of hundreds of terms of one sign."""
    torch.manual_seed(0)
    w = in_float32(torch.rand(4, 4000, dtype=torch.float64))
    x = torch.zeros(1, 4000, dtype=torch.float64)
    claim = matrix_rounding(w).expand(1)
    assert 1e-4 < share(lambda v: v @ w.mT, lambda g: g @ w, x, claim) <= 1
    assert share(lambda v: v @ w.mT, lambda g: g @ w, x, claim / 4000) > 0.2
