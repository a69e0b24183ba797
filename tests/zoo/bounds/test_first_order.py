"""Gradient ascent attacks every rule of the table on at least 200 instances each.

An instance is a module with random weights, a clean input and a radius. The table is enumerated: a rule without a case
in tests/tools/first_order_cases.py fails the test.
"""

import pytest
import torch
from timm.models.swin_transformer import PatchMerging
from torch import Tensor, nn

from tests.tools.ascent import largest_change
from tests.tools.cases import mostly_slow
from tests.tools.first_order_cases import CASES, SHAPES, D, N, instances, reached, scaled_
from zoo.attention.conv_mixing import ConvMixing
from zoo.attention.gpsa import GPSA
from zoo.attention.scsa import ScaledCosineAttention
from zoo.bounds.first_order import layer_of
from zoo.bounds.rule_table import NoRule, types_where
from zoo.layers.block import NormFirstBlock
from zoo.layers.convolution import CellConv2d
from zoo.layers.mlp import SLL, Mlp
from zoo.layers.monotone import MonotoneGELU
from zoo.layers.patches import Normalize
from zoo.layers.residual import WeightedResidual
from zoo.models.convnet import ReLUx
from zoo.primitives import PRIMITIVES

# Chains, attentions, layers and activations; the others are slow tests.
FEW = (
    nn.Linear, nn.ReLU, nn.GELU, MonotoneGELU, nn.Sequential, nn.LayerNorm, SLL, ConvMixing, ScaledCosineAttention,
    GPSA, WeightedResidual, CellConv2d, ReLUx, PatchMerging, NormFirstBlock, Normalize,
)  # fmt: skip


def test_every_rule_has_a_case() -> None:
    assert set(types_where(lambda rules: rules.rule or rules.chain)) - set(PRIMITIVES) == set(CASES)


@pytest.mark.parametrize(
    "kind",
    mostly_slow(CASES, *FEW),
    ids=lambda kind: kind.__name__,
)
def test_no_ascent_beats_the_rule(kind: type[nn.Module]) -> None:
    make, teeth = CASES[kind]
    shape = SHAPES.get(kind, (N, D))
    ratio = reached(instances(make, shape, seed=0)).max()
    assert ratio <= 1 + 1e-9
    assert ratio >= teeth, "the search is too weak to refute a bound that is this much too small"


@pytest.mark.parametrize("kind", [*types_where(lambda rules: rules.residual), Mlp], ids=lambda kind: kind.__name__)
def test_no_ascent_beats_the_residual_rule(kind: type[nn.Module]) -> None:
    ratio = reached(instances(CASES[kind][0], SHAPES.get(kind, (N, D)), seed=1), residual=True).max()
    assert 0.5 <= ratio <= 1 + 1e-9


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_bounds_are_monotone_nonnegative_and_survive_infinity(kind: type[nn.Module]) -> None:
    make, _ = CASES[kind]
    shape = SHAPES.get(kind, (N, D))
    for module, x, r in instances(make, shape, seed=2)[:3]:
        _, bound = layer_of(module)(x)
        values = torch.stack([bound(r * factor) for factor in (0.0, 1e-6, 0.1, 0.5, 1.0, 1.001, 2.0, 1e3)])
        assert (values[1:] >= values[:-1] * (1 - 1e-12)).all()
        assert (values[0] == 0).all()
        infinite = bound(torch.full_like(r, torch.inf))
        assert (infinite >= values[-1]).all(), "an infinite radius must not come back as NaN or small"


def test_the_paper_constants_that_are_wrong_are_caught() -> None:
    """The search refutes GELU slope 1.12 and the SLL layer with GELU."""
    x = torch.full((1, 1, 1), 1.4142, dtype=torch.float64)
    r = torch.tensor([0.05], dtype=torch.float64)
    assert largest_change(nn.GELU(), x, r) > 1.12 * r
    torch.manual_seed(0)
    changes = []
    for _ in range(20):
        layer = scaled_(SLL(D, 4 * D, nn.GELU), 3.0).double().requires_grad_(False)
        changes.append(
            largest_change(layer, torch.randn(20, 1, D, dtype=torch.float64), torch.full((20,), 0.05).double())
        )
    assert torch.cat(changes).max() > 0.05 * 1.001
    with pytest.raises(NoRule, match="GELU"):
        layer_of(SLL(D, D, nn.GELU))


def test_eq_25_as_printed_is_caught() -> None:
    """Eq. 25 with W_K W_Q^T in its second term, instead of W_Q W_K^T, under-estimates the change of the logits."""
    torch.manual_seed(0)
    violations = 0
    for _ in range(50):
        w_q, w_k, x = (torch.randn(s, dtype=torch.float64) for s in ((D, 2), (D, 2), (N, D)))
        a = w_q @ w_k.mT
        eye = torch.eye(N, dtype=torch.float64)
        first = torch.stack([torch.kron(eye[i : i + 1], x @ a.mT) for i in range(N)]).flatten(0, 1)
        true_second = torch.cat([torch.kron(eye, (x[i] @ a)[None]) for i in range(N)])
        printed_second = torch.cat([torch.kron(eye, (x[i] @ a.mT)[None]) for i in range(N)])
        true = torch.linalg.matrix_norm(first + true_second, 2)
        printed = torch.linalg.matrix_norm(first + printed_second, 2)
        xi = torch.linalg.matrix_norm(a @ x.mT, 2) + torch.linalg.matrix_norm(x @ a, 2)
        assert true <= xi * (1 + 1e-12)
        violations += bool(printed < true * (1 - 1e-9))
    assert violations > 0


class Subclass(nn.Linear):
    """A subclass that must not inherit the proof of nn.Linear."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("module", [nn.Conv3d(3, 3, 1), Subclass(3, 3), nn.Softmin(-1)], ids=lambda m: type(m).__name__)
def test_unknown_modules_are_refused_by_name(module: nn.Module) -> None:
    with pytest.raises(NoRule, match=type(module).__name__):
        layer_of(module)


def test_altered_modules_are_refused() -> None:
    hooked, patched = nn.Linear(3, 3), nn.Linear(3, 3)
    hooked.register_forward_hook(lambda module, args, output: 2 * output)
    patched.__dict__["forward"] = lambda x: 2 * x
    for module in (hooked, patched):
        with pytest.raises(NoRule, match=r"a hook|forward is patched"):
            layer_of(module)
