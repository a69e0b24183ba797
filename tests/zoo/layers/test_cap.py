"""Spectral caps: the vectors of their power iteration move at the right times and start close."""

from typing import Any

import pytest
import torch
from torch import nn

from zoo.layers.cap import SpectralCap, cap_, caps_still, settle_caps_


@pytest.fixture
def layer() -> Any:
    """Return a layer with another weight than the orthogonal one that it was capped with, as after loading."""
    torch.manual_seed(0)
    layer: Any = nn.Linear(40, 30)
    cap_(layer, [1.0])
    with torch.no_grad():
        layer.parametrizations.weight.original.copy_(torch.randn(30, 40))
    return layer


def vectors(layer: nn.Module) -> torch.Tensor:
    (cap,) = (module for module in layer.modules() if isinstance(module, SpectralCap))
    return cap.v_KN.clone()


def test_of_the_passes_of_a_step_one_moves_the_vectors(layer: Any) -> None:
    """All passes have the same cap, so any number of micro-batches equals one batch."""
    x, start = torch.randn(6, 40), vectors(layer)
    with caps_still(layer):
        first = [layer(part) for part in x[:4].split(2)]
        assert torch.equal(vectors(layer), start)
    last = layer(x[4:])
    assert not torch.equal(vectors(layer), start)
    moved = vectors(layer)
    with torch.no_grad():
        layer(x)
    assert torch.equal(vectors(layer), moved)
    layer.parametrizations.weight[0].v_KN.copy_(start)
    torch.testing.assert_close(torch.cat([*first, last]), layer(x))


def test_settled_caps_hold_at_the_first_step(layer: Any) -> None:
    with torch.no_grad():
        assert torch.linalg.matrix_norm(layer.weight, 2) > 1.1
        settle_caps_(layer)
        assert 1 - 1e-5 <= torch.linalg.matrix_norm(layer.weight, 2) <= 1.05
