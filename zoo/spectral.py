"""Spectral norms: an estimate for training, an upper bound for certificates. The two never share a name.

Letters: A (..., m, n); G = A^T A or A A^T, whichever is smaller; u = 2^-53; gamma_k as in arithmetic.py.
"""

import torch
from torch import Tensor

from zoo.arithmetic import OUT, U, gamma

# From this size on LOBPCG estimates the largest eigenvalue, where it converges in a quarter of the time of all of them.
LARGE, STEPS = 1024, 40


def power_step(weight: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Run one power iteration on each matrix of a batch.

    weight (..., m, n), v (..., n) unit vectors. Returns sigma = u^T W v_new (...,), differentiable in `weight` with the
    gradient u v_new^T of the norm, and v_new (..., n) without gradient. Where W^T W v is zero, v_new is v: a zero
    vector would remain zero in all later steps, however the weight changes.

    Proof: docs/proofs.md#power-step.
    """
    with torch.no_grad():
        u = torch.nn.functional.normalize((weight @ v.unsqueeze(-1)).squeeze(-1), dim=-1)
        v_new = torch.nn.functional.normalize((weight.mT @ u.unsqueeze(-1)).squeeze(-1), dim=-1)
        v_new = torch.where((v_new != 0).any(-1, keepdim=True), v_new, v)
    sigma = (u.unsqueeze(-2) @ (weight @ v_new.unsqueeze(-1))).flatten(-2).squeeze(-1)
    return sigma, v_new


@torch.no_grad()
def settled(weight: Tensor, v: Tensor, iterations: int = 20) -> Tensor:
    """Return the vectors v (..., n) after some power iterations, so that a first step does not use random ones."""
    for _ in range(iterations):
        _, v = power_step(weight, v)
    return v


def start_vectors(*shape: int) -> Tensor:
    """Return deterministic unit vectors (..., n) to start a power iteration from.

    They are the same on every rank and device, up to rounding.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.nn.functional.normalize(torch.randn(*shape, generator=generator, device="cpu"), dim=-1)
    return start.to(torch.get_default_device())


def sigma_estimate(weight: Tensor, iterations: int = 20) -> Tensor:
    """Estimate ||W||_2 by power iteration: never above it (up to rounding), so for training and inspection only.

    weight (..., m, n) -> (...,). docs/references.md#erratum-power-iteration: on a Gaussian 384 x 768 matrix 5
    iterations reach 0.92-0.94 of the norm.
    """
    v = start_vectors(*weight.shape[:-2], weight.shape[-1]).to(weight)
    return power_step(weight, settled(weight, v, iterations - 1))[0]


def sigma_upper(weight: Tensor) -> Tensor:
    """Return a number never below ||A||_2, per matrix of a batch: (..., m, n) -> (...,) in float64.

    The largest eigenvalue of G gives a candidate theta. If the Cholesky factorisation of theta I - G completes, then
    (Rump; docs/proofs.md#sigma-upper)

        ||A||^2 <= theta + gamma_{n+1}/(1 - gamma_{n+1}) tr(theta I - G) + 4 u theta + gamma_{m+2} ||A||_F^2,

    in any order of summation. Otherwise the function returns the Frobenius norm, rounded up.
    """
    a = weight.detach().double()
    if a.shape[-1] > a.shape[-2]:
        a = a.mT
    m, n = a.shape[-2:]
    frobenius2 = a.square().sum((-2, -1)) * (1 + 4 * gamma(m * n + 2))
    # A matrix in the subnormal range underflows in G, where the relative error bounds do not hold.
    frobenius2 = frobenius2 + m * n * 2.0**-1000
    gram = a.mT @ a
    finite = torch.isfinite(gram).all(-1).all(-1)
    gram = torch.where(finite[..., None, None], gram, torch.zeros_like(gram))
    theta, trace, sure = _candidate(gram, estimated=n >= LARGE)
    slack = gamma(n + 1) / (1 - gamma(n + 1)) * trace + 4 * U * theta + gamma(m + 2) * frobenius2
    verified = (theta + slack) * (1 + 8 * U) + n * 2.0**-1000
    square = torch.where(sure & finite, torch.minimum(verified, frobenius2), frobenius2)
    return square.sqrt() * (1 + 4 * U)


def _candidate(gram: Tensor, *, estimated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return theta, the trace of theta I - G, and whether its Cholesky factorisation completes.

    An estimate that falls short of the largest eigenvalue fails, and all eigenvalues are computed.
    """
    largest = _estimate(gram) if estimated else torch.linalg.eigvalsh(gram)[..., -1]
    theta = largest.clamp_min(0) * (1 + 1e-9)
    shifted = theta[..., None, None] * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device) - gram
    _, info = torch.linalg.cholesky_ex(shifted)
    if estimated and bool((info != 0).any()):
        return _candidate(gram, estimated=False)
    return theta, shifted.diagonal(dim1=-2, dim2=-1).sum(-1), info == 0


def _estimate(gram: Tensor) -> Tensor:
    """Estimate the largest eigenvalue by LOBPCG, from below; 0 where it finds none."""
    size = gram.abs().amax((-2, -1)).clamp_min(2.0**-1000)
    start = start_vectors(gram.shape[-1]).to(gram)[:, None].expand(*gram.shape[:-1], 1).clone()
    try:
        found, _ = torch.lobpcg(gram / size[..., None, None], X=start, niter=STEPS, tol=1e-12, largest=True)
    except torch.linalg.LinAlgError:
        return torch.zeros_like(size)
    return (size * found.squeeze(-1)).nan_to_num(0.0)


def absolute_norm(weight: Tensor) -> Tensor:
    """Return a bound of the norm of |W|, per matrix of a batch: (..., m, n) -> (...)."""
    absolute = weight.abs()
    rows, columns = absolute.sum(-1).amax(-1), absolute.sum(-2).amax(-1)
    return torch.minimum((rows * columns).sqrt(), torch.linalg.vector_norm(weight, dim=(-2, -1))) * OUT


def product_rounding(a: Tensor, b: Tensor) -> Tensor:
    """Return a bound of the norm of fl(A B) - A B: (..., m, k), (..., k, n) -> (...)."""
    return gamma(a.shape[-1] + 2) * absolute_norm(a) * absolute_norm(b) * OUT


def product_upper(a: Tensor, b: Tensor) -> Tensor:
    """Return a number never below ||A B||, even if terms cancel in the product that torch computes."""
    return sigma_upper(a @ b) + product_rounding(a, b)
