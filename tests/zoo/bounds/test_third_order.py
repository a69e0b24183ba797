"""Third order of all modules with forms: the Hessian, ranges, planted faults. The ascent is in test_forms.py."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.tools.cases import mostly_slow
from tests.tools.curvature_cases import CASES, DERIVATIVES, HERE
from tests.tools.form_attacks import attacks, grazing
from zoo.bounds import elementwise
from zoo.bounds.activations import Hinge, Smooth
from zoo.bounds.elementwise import UnitForms
from zoo.bounds.third_order import SecondRange, cubic, second_range
from zoo.layers.mlp import Mlp
from zoo.layers.norm_forms import NormForms, ProjectForms
from zoo.layers.norms import LayerProject, SmoothProject
from zoo.primitives.activations import MISH, elu, leaky

SMOOTH = [*(act for act, _ in DERIVATIVES), MISH]


@pytest.mark.parametrize(("kind", "i"), HERE, ids=lambda v: v.__name__ if isinstance(v, type) else str(v))
def test_within_a_small_reach_a_form_is_minus_the_hessian(kind: type[nn.Module], i: int) -> None:
    """Compare with double backward; a hinge has no Hessian, and a projection has one off its sphere."""
    for attack in attacks(CASES[kind][i], 5, 2):
        x, g = attack.instance.x.clone().requires_grad_(True), attack.instance.g
        if isinstance(attack.forms, UnitForms) and not isinstance(attack.forms.activation, Smooth):
            continue
        form = attack.forms.signed(g[:1], 1e-7 * attack.reach).form
        (slope,) = torch.autograd.grad((g[0] * attack.instance.module(x)).sum(), x, create_graph=True)
        v = torch.randn_like(x)
        (wanted,) = torch.autograd.grad((slope * v).sum(), x)
        size_B = form.largest[0] * v.flatten(1).norm(dim=1)
        error_B = (form.apply(v[None])[0] + wanted).flatten(1).norm(dim=1)
        assert (error_B <= 1e-5 * size_B + 1e-9).all()


def test_kinks_have_no_third_order() -> None:
    z = torch.zeros(3).double()
    assert second_range(Hinge(), z, z) is None
    assert second_range(leaky(0.1), z, z) is None


@pytest.mark.parametrize("act", [*SMOOTH, elu(nn.ELU())])
def test_mean_curvature_stays_in_its_range(act: Smooth) -> None:
    torch.manual_seed(0)
    z, reach = torch.randn(1000).double() * 2, 10 ** torch.empty(1000).uniform_(-4, 1).double()
    found = second_range(act, z, reach)
    assert found is not None
    t, weight = midpoints(400)
    for share in (-1.0, -0.5, -0.1, 0.1, 0.5, 1.0):
        c = (weight * act.second(z + share * reach * t)).sum(0)
        assert (c - found.s <= found.hi + 1e-5 * reach.square()).all()
        assert (c - found.s >= found.lo - 1e-5 * reach.square()).all()
        for w in (-1.0, 1.0):
            assert (-w * c <= found.against(torch.full_like(z, w)) + 1e-5 * reach.square()).all()
    assert (found.lo <= 0).all()
    assert (found.hi >= 0).all()


def midpoints(count: int) -> tuple[Tensor, Tensor]:
    """Return t (count, 1) in [0, 1] and its weights 2 (1 - t) / count, with the sum 1."""
    t = (torch.arange(count).double().unsqueeze(1) + 0.5) / count
    return t, 2 * (1 - t) / count


@pytest.mark.parametrize("act", SMOOTH)
def test_the_third_derivative_is_below_its_bound(act: Smooth) -> None:
    z = torch.linspace(-12, 12, 200_001).double().requires_grad_(True)
    (third,) = torch.autograd.grad(act.second(z).sum(), z)
    assert act.steepest * 0.999 < third.abs().max() <= act.steepest * (1 + 1e-12)


@pytest.mark.parametrize("act", SMOOTH)
def test_the_fourth_derivative_is_below_its_bound(act: Smooth) -> None:
    z = torch.linspace(-12, 12, 200_001).double().requires_grad_(True)
    (third,) = torch.autograd.grad(act.second(z).sum(), z, create_graph=True)
    (fourth,) = torch.autograd.grad(third.sum(), z)
    assert act.most_fourth * 0.999 < fourth.abs().max() <= act.most_fourth * (1 + 1e-12)


@pytest.mark.parametrize("act", SMOOTH)
def test_the_cubic_encloses_the_mean_within_the_reach(act: Smooth) -> None:
    """Compare c - s - m d with its bound at many points, and near 0 with the fourth derivative."""
    z, reach = torch.linspace(-6, 6, 300).double(), 10 ** (torch.arange(300) % 7 - 5.0).double()
    found, (t, weight) = cubic(act, z, reach), midpoints(2000)
    for share in torch.linspace(-1, 1, 21):
        d = share * reach
        c = (weight * act.second(z + d * t)).sum(0)
        assert ((c - act.second(z) - found.m * d).abs() <= found.rest + 1e-6 * reach.square() + 1e-7 * reach).all()
    small = cubic(act, z, torch.full_like(z, 1e-3)).rest
    assert (small <= act.most_fourth * 1e-6 / 12 * 1.01 + 1e-12).all()


def test_delta_falls_with_the_reach_and_never_exceeds_its_third() -> None:
    """At small reach c - s is at most sigma''' D / 3."""
    for act in SMOOTH:
        z, reach = torch.linspace(-3, 3, 100).double(), torch.full((100,), 1e-3).double()
        found = second_range(act, z, reach)
        assert found is not None
        assert (torch.maximum(-found.lo, found.hi) <= act.steepest * reach / 3 * (1 + 1e-6) + 1e-12).all()


def less_range(factor: float) -> Callable[..., SecondRange | None]:
    def planted(*args: Tensor) -> SecondRange | None:
        found = second_range(*args)  # type: ignore[arg-type]
        return found and SecondRange(found.s, factor * found.lo, factor * found.hi)

    return planted


third = NormForms._third
# a fault: (its type, the replaced attribute, the replacement)
FAULTS: dict[str, tuple[type[nn.Module], object, str, object]] = {
    "c too close to s": (nn.GELU, elementwise, "second_range", less_range(0.6)),
    "c of hidden units too close to s": (Mlp, elementwise, "second_range", less_range(0.1)),
    "third order of a norm too small": (SmoothProject, NormForms, "_third", lambda self, r: 0.1 * third(self, r)),
    "second order of a norm forgotten": (nn.LayerNorm, NormForms, "_bend", 0.0),
    "nothing crosses the sphere": (
        LayerProject, ProjectForms, "_third", lambda self, r: torch.where(self._inside, 0.0, third(self, r))
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", mostly_slow(FAULTS, "c too close to s", "third order of a norm too small"))
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, where, name, by = FAULTS[fault]
    monkeypatch.setattr(where, name, by)
    many = [attack for case in CASES[kind] for attack in attacks(case, 0, 4)]
    assert any(attack.beaten() for attack in [*many, *(grazing(0) if kind is LayerProject else ())])
