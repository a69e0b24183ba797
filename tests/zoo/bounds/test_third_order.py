"""Forms of third order of every type that has them, under ascent over X and b; planted faults are detected."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.tools.cases import mostly_slow
from tests.tools.curvature_cases import CASES, DERIVATIVES, FEW
from tests.tools.form_attacks import Attack, attacks, grazing
from tests.tools.third_attacks import beaten
from zoo.bounds import elementwise
from zoo.bounds.activations import Hinge, Smooth
from zoo.bounds.third_order import SecondRange, second_range
from zoo.layers.mlp import Mlp
from zoo.layers.norm_forms import NormForms, ProjectForms
from zoo.layers.norms import LayerProject, SmoothProject
from zoo.primitives.activations import MISH, elu, leaky

SMOOTH = [*(act for act, _ in DERIVATIVES), MISH]
few_cases = pytest.mark.parametrize(("kind", "i"), FEW, ids=lambda v: v.__name__ if isinstance(v, type) else str(v))


@few_cases
def test_no_ascent_beats_a_form_of_third_order(kind: type[nn.Module], i: int) -> None:
    found = [attack for attack in attacks(CASES[kind][i], 0, 3) if attack.third is not None]
    assert not any(map(beaten, found))


def test_no_ascent_beats_a_projection_near_its_sphere() -> None:
    assert not any(map(beaten, grazing(0)))


def test_kinks_have_no_third_order() -> None:
    z = torch.zeros(3).double()
    assert second_range(Hinge(), z, z) is None
    assert second_range(leaky(0.1), z, z) is None
    assert all(attack.third is None for attack in attacks(CASES[nn.ReLU][0], 0, 1))


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
        assert (c.abs() <= found.kappa + 1e-5 * reach.square()).all()
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
    assert act.third * 0.999 < third.abs().max() <= act.third * (1 + 1e-12)


def test_delta_falls_with_the_reach_and_never_exceeds_its_third() -> None:
    """At small reach c - s is at most sigma''' D / 3."""
    for act in SMOOTH:
        z, reach = torch.linspace(-3, 3, 100).double(), torch.full((100,), 1e-3).double()
        found = second_range(act, z, reach)
        assert found is not None
        assert (found.delta <= act.third * reach / 3 * (1 + 1e-6) + 1e-12).all()


def less_range(factor: float) -> Callable[..., SecondRange | None]:
    def planted(*args: Tensor) -> SecondRange | None:
        found = second_range(*args)  # type: ignore[arg-type]
        return found and SecondRange(found.s, factor * found.lo, factor * found.hi, found.kappa)

    return planted


def less_kappa(*args: Tensor) -> SecondRange | None:
    found = second_range(*args)  # type: ignore[arg-type]
    return found and SecondRange(found.s, found.lo, found.hi, 0.5 * found.kappa)


third = NormForms._third
# a fault: (its type, the replaced attribute, the replacement)
FAULTS: dict[str, tuple[type[nn.Module], object, str, object]] = {
    "delta too small": (nn.GELU, elementwise, "second_range", less_range(0.6)),
    "kappa too small": (nn.Tanh, elementwise, "second_range", less_kappa),
    "delta of hidden units too small": (Mlp, elementwise, "second_range", less_range(0.1)),
    "third order of a norm too small": (SmoothProject, NormForms, "_third", lambda self, r: 0.1 * third(self, r)),
    "second order of a norm forgotten": (nn.LayerNorm, NormForms, "_second", property(lambda self: 0 * self._rho)),
    "nothing crosses the sphere": (
        LayerProject, ProjectForms, "_third", lambda self, r: torch.where(self._inside, 0.0, third(self, r))
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", mostly_slow(FAULTS, "delta too small", "third order of a norm too small"))
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, where, name, by = FAULTS[fault]
    monkeypatch.setattr(where, name, by)
    if name == "_second":
        monkeypatch.setattr(norms_of(kind), name, by)
    many: list[Attack] = [attack for case in CASES[kind] for attack in attacks(case, 0, 4)]
    assert any(map(beaten, [*many, *(grazing(0) if kind is LayerProject else ())]))


def norms_of(kind: type[nn.Module]) -> type[NormForms]:
    forms = next(attacks(CASES[kind][0], 0, 1)).forms
    assert isinstance(forms, NormForms)
    return type(forms)
