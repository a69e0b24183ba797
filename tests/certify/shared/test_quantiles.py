"""Sums of squares of multilinear forms of Gaussian vectors: the worst has rank one, and the quantiles hold."""

import math

import pytest
import torch

from certify.shared.quantiles import _transform, least_mean_length, least_product_sum
from tests.tools.ascent import ascend


@pytest.mark.parametrize("t", [0.1, 1.0, 10.0])
def test_ascent_over_singular_values_ends_at_rank_one(t: float) -> None:
    """Maximise E exp(-t <X, H Y>^2) over |H|_F = 1. Given X it is E (1 + 2 t sum_i s_i^2 X_i^2)^(-1/2)."""
    square = torch.randn(20000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).square()
    one = (1 + 2 * t * square[:, 0]).rsqrt().mean()

    def transform(s: torch.Tensor) -> torch.Tensor:
        share = s.square() / s.square().sum(1, keepdim=True)
        return (1 + 2 * t * share @ square.T).rsqrt().mean(1)

    found = ascend(transform, torch.full((1, 4), 0.5, dtype=torch.float64), torch.full((1,), 1.0).double(), 60, 8)
    assert found <= (1 + 2 * t * square).rsqrt().mean(0).max() * (1 + 1e-9)
    assert abs(float(found - one)) < 0.02
    assert one <= _transform(t, 2) + 4 * one / 20000**0.5


@pytest.mark.parametrize("t", [0.01, 0.3, 5.0, 100.0])
def test_the_transform_is_bounded_closely(t: float) -> None:
    """L(t) = (2 z / pi)^(1/2) e^z K_0(z) for z = 1 / (8 t)."""
    z = torch.tensor(1 / (8 * t), dtype=torch.float64)
    exact = float((2 * z / math.pi).sqrt() * torch.special.scaled_modified_bessel_k0(z))
    assert exact <= _transform(t, 2) <= exact + 1e-4


@pytest.mark.parametrize("t", [0.1, 3.0, 100.0])
def test_the_transform_of_triples_is_bounded_closely(t: float) -> None:
    x, y = torch.randn(2, 10**6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).square()
    found = (1 + 2 * t * x * y).rsqrt()
    assert found.mean() - 4e-3 * found.std() <= _transform(t, 3) <= found.mean() + 0.01


@pytest.mark.parametrize(("count", "chance"), [(10, 0.2), (40, 0.05)])
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("order", [2, 3])
def test_sums_are_seldom_below_the_quantile(order: int, count: int, chance: float, rank: int) -> None:
    random, least = torch.Generator().manual_seed(0), least_product_sum(count, order, chance)
    vectors = torch.randn(order, 20000, count, rank, generator=random, dtype=torch.float64)
    sums = (vectors.prod(0).sum(-1).square() / rank).sum(1)
    assert 0 < least < count
    assert (sums <= least).double().mean() <= chance


@pytest.mark.parametrize("order", [2, 3])
def test_too_few_say_nothing(order: int) -> None:
    assert least_product_sum(1, order, 1e-16) == 0.0


@pytest.mark.parametrize(("count", "chance"), [(10, 0.2), (40, 0.05)])
@pytest.mark.parametrize("together", [0.0, 0.7, 1.0])
def test_means_of_lengths_are_seldom_below_the_quantile(count: int, chance: float, together: float) -> None:
    """Lengths that depend on each other, up to all being the same, with weights of many sizes."""
    random = torch.Generator().manual_seed(0)
    own, shared = torch.randn(20000, 5, count, generator=random), torch.randn(20000, 1, count, generator=random)
    lengths = (together**0.5 * shared + (1 - together) ** 0.5 * own).norm(dim=-1).double()
    weights = torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5], dtype=torch.float64)
    least = least_mean_length(count, chance)
    assert 0.5 * count**0.5 < least < count**0.5
    assert (lengths @ (weights / weights.sum()) <= least).double().mean() <= chance
