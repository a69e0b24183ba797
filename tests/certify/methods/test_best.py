"""`best`: linear bounds join where units have kinks, few of them and operations with bounds."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from certify import certified_radius, certify
from certify.api import captured, certifier
from certify.linear.linear import Linear
from certify.methods import best
from certify.methods.best import Best
from tests.tools.ascent import ascend, ascend_box, margin_loss
from tests.tools.cases import mostly_slow
from tests.tools.small_models import labelled, small_model
from zoo.bounds.rule_table import NoRule

ASCENTS = {"l2": ascend, "linf": ascend_box}


def mlp(act: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), act())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(16, 4)).double().eval()


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    x = torch.rand(2, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x, model(x).argmax(1)


def methods(made: object) -> set[str]:
    assert isinstance(made, Best)
    return {type(each).__name__ for each in made.certifiers}


@pytest.mark.parametrize("norm", mostly_slow(ASCENTS, "l2"))
def test_relus_get_linear_bounds_which_no_ascent_beats(norm: str) -> None:
    model = mlp(nn.ReLU)
    x, y = batch(model)
    eps = 0.9 * certified_radius(model, x, y, "linear", norm=norm)
    found, taylor = (certify(model, x, y, eps, method, norm=norm) for method in ("best", "taylor"))
    assert found.certified_B.all()
    assert not taylor.certified_B.any()
    assert (ASCENTS[norm](margin_loss(model, y), x, eps, steps=40, starts=2) <= 0).all()


def test_smooth_models_do_without_them() -> None:
    model = mlp(nn.Tanh)
    assert "Linear" not in methods(certifier(model, "best", batch=batch(model)))


def test_models_with_many_kinks_do_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(nn.ReLU)
    x, y = batch(model)
    given = captured(model, (1, 4, 4))
    assert Linear(given, most=64).analyse(x, y).clean.correct_B.all()
    monkeypatch.setattr(best, "KINKS", 63)
    made = Best(given)
    assert not made.analyse(x, y).at(math.inf).certified_B.any()
    with pytest.raises(NoRule, match="64 units with kinks are more than 63"):
        next(each for each in made.certifiers if isinstance(each, Linear)).analyse(x, y)


def test_operations_without_linear_bounds_leave_the_other_methods() -> None:
    """Layer projections have none yet; the reason is found once."""
    model = small_model("lofast", 0)
    x, y = labelled(model, 2, 0)
    made = certifier(model, "best", "n")
    for _ in range(2):
        found, alone = (each.analyse(x, y).at(1e-3) for each in (made, certifier(model, "taylor", "n")))
        assert torch.equal(found.loss_B, alone.loss_B)
    assert "Linear" in methods(made)
