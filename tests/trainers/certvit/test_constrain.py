"""CertViT's stage 2: the projection is the nearest point, and Douglas-Rachford ends at the sparsest one of the set."""

import pytest
import torch
from torch import Tensor

from tests.tools.cases import mostly_slow
from trainers.certvit.douglas_rachford import Rows, project, solve
from trainers.certvit.prox import soft_threshold


def layer(t: int = 40, i: int = 6, o: int = 5, j: int = 3) -> tuple[Tensor, list[Rows]]:
    torch.manual_seed(0)
    w = torch.randn(o, i, dtype=torch.float64) * torch.rand(o, i, dtype=torch.float64) ** 2
    x = torch.randn(j, t, i, dtype=torch.float64) @ torch.diag(torch.linspace(0.3, 2, i, dtype=torch.float64))
    return w, [Rows(part, part @ w.mT) for part in x]


def members(w: Tensor, batches: list[Rows], eta: float, count: int = 200) -> list[Tensor]:
    """Return points of C between w, which is in it, and random points."""
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(count):
        far, share = torch.randn(w.shape, generator=generator, dtype=w.dtype), 1.0
        while any(rows.excess(w + share * far, eta)[0] > 0 for rows in batches):
            share *= 0.9
        found.append(w + share * far)
    return found


def test_the_excess_has_its_gradient() -> None:
    w, batches = layer()
    theta = torch.full_like(batches[0].y, 0.8)
    for rows in (batches[0], Rows(batches[0].x, batches[0].y, theta)):
        v = (w + 0.3 * torch.randn_like(w)).requires_grad_()
        c, gradient = rows.excess(v, 0.01)
        assert torch.allclose(torch.autograd.grad(c, v)[0], gradient.detach())
        assert rows.excess(w, 0.0)[0] <= 1e-12, "the layer as it was misses nothing"


def test_what_an_activation_hides_is_free() -> None:
    """Weights that give the same activations cost nothing; others cost at least their difference in activations."""
    w, (rows, *_) = layer()
    theta = torch.full_like(rows.y, 0.5)
    hidden = Rows(rows.x, rows.y, theta)
    generator = torch.Generator().manual_seed(2)
    for _ in range(50):
        v = w + 0.5 * torch.randn(w.shape, generator=generator, dtype=w.dtype)
        change = (rows.x @ v.mT).clamp(0, 0.5) - (rows.x @ w.mT).clamp(0, 0.5)
        assert change.norm() <= hidden.miss(v).norm() + 1e-12
    for b in (torch.full_like(w[:, 0], 0.4), torch.linspace(-1, 1, len(w), dtype=w.dtype)):
        biased = Rows(rows.x, rows.y, theta, b)
        assert biased.miss(w).abs().max() <= 1e-12
        for _ in range(50):
            v = w + 0.5 * torch.randn(w.shape, generator=generator, dtype=w.dtype)
            change = (rows.x @ v.mT + b).clamp(0, 0.5) - (rows.x @ w.mT + b).clamp(0, 0.5)
            assert change.norm() <= biased.miss(v).norm() + 1e-12
    one = torch.ones(1, 1, dtype=w.dtype)
    dead, full = (Rows(one, s * one, 0.5 * one) for s in (-1.0, 2.0))
    assert dead.miss(-5 * one) == 0
    assert dead.miss(0.2 * one) > 0
    assert full.miss(9 * one) == 0
    assert full.miss(0.2 * one) < 0


def test_an_activation_sees_the_bias_too() -> None:
    """Thresholds apply to W x + b: with b as a column of the matrix and inputs of 1, the misses are the same."""
    w, (rows, *_) = layer()
    theta, b = torch.full_like(rows.y, 0.5), torch.linspace(-2, 2, len(w), dtype=w.dtype)
    beside = Rows(rows.x, rows.y, theta, b)
    ones = torch.ones(len(rows.x), 1, dtype=w.dtype)
    inside = Rows(torch.cat([rows.x, ones], 1), rows.y + b, theta)
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        v = w + 0.5 * torch.randn(w.shape, generator=generator, dtype=w.dtype)
        assert torch.allclose(beside.miss(v), inside.miss(torch.cat([v, b[:, None]], 1)))
    assert beside.miss(w).norm() < 1e-12


def test_the_projection_is_the_nearest_point() -> None:
    """The projection p is in C, and <w_0 - p, c - p> <= 0 for every c of C, which has one solution."""
    w, batches = layer()
    eta = 0.05
    w_0 = w + torch.randn(w.shape, generator=torch.Generator().manual_seed(3), dtype=w.dtype)
    p = project(w_0, batches, eta, passes=1500, precision=1e-9)
    assert all(rows.share(p) <= eta * (1 + 1e-3) for rows in batches)
    assert sum(rows.share(p) > 0.99 * eta for rows in batches) >= 1, "on the border"
    for c in members(w, batches, eta):
        assert ((w_0 - p) * (c - p)).sum() <= 1e-3 * (w_0 - p).norm() * (c - p).norm()
    assert torch.equal(project(w, batches, eta, passes=5), w)


def test_with_orthonormal_inputs_the_solution_is_a_soft_threshold() -> None:
    """The minimum of ||V||_1 with ||V - W||^2 <= eta ||W||^2 is at soft(W, t), t found by bisection."""
    w, _ = layer(o=8, i=8)
    rows, eta = Rows(torch.eye(8, dtype=torch.float64), w.mT.clone()), 0.04
    low, high = 0.0, float(w.abs().max())
    for _ in range(60):
        middle = (low + high) / 2
        inside = (soft_threshold(w, middle) - w).square().sum() <= eta * w.square().sum()
        low, high = (middle, high) if inside else (low, middle)
    exact = soft_threshold(w, low)
    for gamma, rate in ((0.1, 1.2), (0.3, 1.0)):
        found = solve(w, [rows], gamma=gamma, eta=eta, rate=rate, iterations=200, passes=100)
        assert (found - exact).norm() <= 1e-2 * exact.norm()
        assert int((found == 0).sum()) >= 0.8 * int((exact == 0).sum()) > 3


def test_the_fixed_point_is_in_the_set_and_sparser() -> None:
    w, batches = layer(i=16, o=12, t=10)  # with fewer rows than unknowns many weights can vanish
    eta = 0.02
    found = solve(w, batches, gamma=0.05, eta=eta, rate=1.2, iterations=150, passes=30)
    assert max(rows.share(found) for rows in batches) <= 1.05 * eta
    assert (found == 0).sum() > (w == 0).sum() + 0.05 * w.numel()
    assert found.abs().sum() < 0.97 * w.abs().sum()
    cheapest = min(float(c.abs().sum()) for c in members(w, batches, eta))
    assert found.abs().sum() <= cheapest * 1.001


@pytest.mark.parametrize("eta", mostly_slow((0.001, 0.3), 0.3))
def test_more_tolerance_takes_more_away(eta: float) -> None:
    w, batches = layer()
    found = [solve(w, batches, gamma=0.05, eta=e, rate=1.2, iterations=100, passes=100) for e in (eta, 2 * eta)]
    assert found[1].abs().sum() < found[0].abs().sum() <= w.abs().sum()
