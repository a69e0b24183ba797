"""CertViT's proximal operator: it solves its own definition, and never expands."""

import torch

from trainers.certvit.prox import magnitude_quantile, soft_threshold


def test_it_is_the_minimiser() -> None:
    """Compare with a slow search over a fine grid of p, for t ||p||_1 + 1/2 ||p - w||^2."""
    torch.manual_seed(0)
    w = torch.cat([torch.randn(60, dtype=torch.float64), torch.tensor([0.0, 0.5, -0.5])])
    grid = torch.linspace(-4, 4, 80001, dtype=torch.float64)
    for t in (0.0, 0.1, 0.5, 2.0):
        found = soft_threshold(w, t)
        for w_i, p_i in zip(w, found, strict=True):
            best = grid[(t * grid.abs() + (grid - w_i).square() / 2).argmin()]
            assert abs(float(best - p_i)) <= 1e-4


def test_it_is_firmly_non_expansive() -> None:
    """Check ||prox a - prox b||^2 <= <prox a - prox b, a - b>, also with a threshold for each entry."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 1000, 8, dtype=torch.float64, generator=generator)
    for t in (0.3, torch.rand(8, dtype=torch.float64, generator=generator)):
        change = soft_threshold(a, t) - soft_threshold(b, t)
        assert bool((change.square().sum(1) <= (change * (a - b)).sum(1) + 1e-12).all())


def test_small_entries_vanish_and_gradients_flow_to_the_others() -> None:
    w = torch.tensor([-2.0, -0.1, 0.0, 0.1, 2.0], requires_grad=True)
    p = soft_threshold(w, 0.5)
    assert p.tolist() == [-1.5, 0.0, 0.0, 0.0, 1.5]
    (g,) = torch.autograd.grad(p.sum(), w)
    assert g.tolist() == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_the_quantile_leaves_zeros_out() -> None:
    w = torch.tensor([[0.0, -4.0, 1.0], [0.0, 3.0, -2.0]])
    assert float(magnitude_quantile(w, 0.0)) == 1.0
    assert float(magnitude_quantile(w, 0.5)) == 2.5
    assert float(magnitude_quantile(torch.zeros(3), 0.5)) == 0.0
