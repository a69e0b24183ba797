"""sigma_estimate is never above and sigma_upper never below the norm; the oracle is NumPy's float64 SVD."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.spectral import power_step, sigma_estimate, sigma_upper, start_vectors


def svd_norm(a: torch.Tensor) -> np.ndarray:
    return np.linalg.svd(a.double().numpy(), compute_uv=False)[..., 0]


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    scale=st.floats(-140, 140),
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(["gaussian", "orthogonal", "rank one", "clustered", "blind"]),
    large=st.sampled_from([3, 1024]),
)
def test_upper_bound_is_never_below_and_close(m: int, n: int, scale: float, seed: int, kind: str, large: int) -> None:
    """From a size on, the largest eigenvalue is estimated first."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(m, n, generator=generator, dtype=torch.float64)
    if kind == "orthogonal":
        a = torch.linalg.qr(a)[0]
    elif kind == "rank one":
        a = a[:, :1] @ a[:1]
    elif kind == "clustered":
        u, s, v = torch.linalg.svd(a, full_matrices=False)
        a = u * (1 + 1e-9 * s) @ v
    elif kind == "blind":  # the estimate starts across the largest singular vector
        start = start_vectors(min(m, n)).double()
        a = a - (a @ start)[:, None] * start if n <= m else a - start[:, None] * (start @ a)
    a = a * 10.0**scale
    with mock.patch("zoo.spectral.LARGE", large):
        true, upper = svd_norm(a), sigma_upper(a).numpy()
    assert upper >= true * (1 - 1e-13)  # the oracle itself errs by a few units
    assert upper <= true * (1 + 1e-6) + 1e-140


def test_upper_bound_of_zero_tiny_and_infinite_matrices() -> None:
    assert 0 <= sigma_upper(torch.zeros(3, 4)) < 1e-140
    tiny = torch.full((4, 4), 1e-170, dtype=torch.float64)  # its Gram matrix underflows to zero
    assert sigma_upper(tiny) >= 4e-170
    assert not torch.isfinite(sigma_upper(torch.full((3, 3), torch.inf)))


def test_upper_bound_is_batched() -> None:
    a = torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(0))
    one_by_one = torch.stack([sigma_upper(m) for m in a.flatten(0, 1)]).view(2, 3)
    torch.testing.assert_close(sigma_upper(a), one_by_one, rtol=1e-12, atol=0)


@pytest.mark.parametrize("iterations", [1, 5, 50])
def test_estimate_is_never_above(iterations: int) -> None:
    a = torch.randn(50, 30, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    estimate = sigma_estimate(a, iterations).numpy()
    assert (estimate <= svd_norm(a) * (1 + 1e-12)).all()


def test_an_estimate_would_fail_as_a_bound() -> None:
    """Five iterations lie clearly below the norm, so the test above can fail."""
    a = torch.randn(384, 768, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert sigma_estimate(a, 5) < 0.99 * svd_norm(a)


def test_gradient_of_a_converged_power_step_is_that_of_the_norm() -> None:
    weight = torch.randn(6, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True)
    v = start_vectors(9).double()
    for _ in range(500):
        _, v = power_step(weight.detach(), v)
    sigma, _ = power_step(weight, v)
    (gradient,) = torch.autograd.grad(sigma, weight)
    (oracle,) = torch.autograd.grad(torch.linalg.matrix_norm(weight, 2), weight)
    torch.testing.assert_close(gradient, oracle, rtol=1e-6, atol=1e-8)


def test_a_pass_with_a_zero_weight_leaves_the_vectors_alive() -> None:
    """A zero vector would stay zero, and turn off the cap and the penalty of that block."""
    weight = torch.randn(3, 6, 9, generator=torch.Generator().manual_seed(4))
    sigma, v = power_step(torch.zeros_like(weight), start_vectors(3, 9))
    assert torch.equal(sigma, torch.zeros(3))
    assert torch.equal(v, start_vectors(3, 9))
    one_zero = weight * torch.tensor([1.0, 0.0, 1.0])[:, None, None]
    for step in (one_zero, *[weight] * 30):
        sigma, v = power_step(step, v)
    assert (sigma >= 0.9 * torch.from_numpy(svd_norm(weight))).all()
