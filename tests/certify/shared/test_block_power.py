"""Norms by powers: above the truth for every spectrum, whatever rounding does, and not far above."""

import pytest
import torch
from torch import Tensor

from certify.shared import block_power
from certify.shared.quantiles import least_square_sum

N, L = 300, 40
LEAST = least_square_sum(block_power.VECTORS, 1e-11)
SPECTRA = {
    "flat": torch.linspace(0, 1, N).double(),
    "one": torch.eye(N)[0].double(),
    "equal": torch.ones(N).double(),
    "falling": 0.97 ** torch.arange(N).double(),
}


def found(values: Tensor, slip: float = 0.0, off: float = 0.0, within: float = 100.0, least: float = LEAST) -> Tensor:
    """Return the bounds of L norms of a diagonal map; products are off by `off` along the top direction, against it."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(L, block_power.VECTORS, N, generator=generator, dtype=torch.float64)
    top = torch.eye(N, dtype=torch.float64)[values.argmax()]

    def apply(v: Tensor) -> Tensor:
        image, length = v * values, v.norm(dim=-1, keepdim=True)
        against = (image @ top).sign().unsqueeze(-1) * torch.minimum((image @ top).abs().unsqueeze(-1), off * length)
        return image - against * top

    full = torch.full((L,), 1.0, dtype=torch.float64)
    return block_power.norm_upper(apply, apply, start, slip * full, within * full, least)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 50.0])
@pytest.mark.parametrize("kind", SPECTRA)
def test_the_bound_is_above_the_norm_and_not_far(kind: str, scale: float) -> None:
    bound_L = found(scale * SPECTRA[kind])
    assert (bound_L >= scale).all()
    assert (bound_L <= (2.5 if kind == "equal" else 1.6) * scale).all()


@pytest.mark.parametrize("off", [1e-8, 1e-4, 1e-3, 1e-2, 0.1, 1.0])
def test_errors_against_the_top_direction_are_covered(off: float) -> None:
    values = torch.cat([0.05 * SPECTRA["flat"][1:], torch.ones(1).double()])
    bound_L = found(values, slip=off, off=off)
    assert (bound_L >= 1).all()
    assert (bound_L <= 1.6).all() == (off < 0.01)


def test_errors_that_are_not_counted_would_be_seen() -> None:
    values = torch.cat([0.05 * SPECTRA["flat"][1:], torch.ones(1).double()])
    assert (found(values, slip=0.0, off=0.1) < 1).any()


def test_a_quantile_that_is_too_large_would_be_seen() -> None:
    assert (found(SPECTRA["one"], least=4 * block_power.VECTORS) < 1).all()


def test_what_is_known_is_never_exceeded() -> None:
    assert (found(SPECTRA["flat"], within=1.01) <= 1.01).all()
    assert (found(SPECTRA["flat"], slip=float("inf"), within=3.0) == 3.0).all()
    assert (found(0 * SPECTRA["flat"], within=3.0) <= 1e-9).all()
    assert (found(float("nan") * SPECTRA["flat"], within=3.0) == 3.0).all()
