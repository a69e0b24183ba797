"""Arithmetic of bounds in float64: rounding, 0 times infinity, NaN, and broadcasting of numbers per image."""

import torch
from torch import Tensor

U = 2.0**-53  # unit round-off of float64
OUT = 1 + 1e-9  # factor that covers the rounding of a bound's own formulas
UNDERFLOW = 2.0**-480  # squares of smaller numbers lose digits, or vanish
NEAR, FAR = 2.0**-200, 2.0**200  # radii: smaller ones count as NEAR, larger ones as infinite (docs/proofs.md#range)


def gamma(k: int, unit: float = U) -> float:
    """Return gamma_k = k u / (1 - k u), the relative error of k roundings in any order (Higham 2002, section 3.1)."""
    return k * unit / (1 - k * unit)


def product(factor: Tensor, bound: Tensor) -> Tensor:
    """Return factor * bound, where 0 times infinity is 0: a factor of 0 lets nothing through."""
    return torch.where((factor == 0) | (bound == 0), 0.0, factor * bound)


def length(x: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """Return |x| along these axes, or sqrt(n) max |x| where its squares underflow.

    It is never below |x| except for rounding, and 0 only for 0. Proof: docs/proofs.md#range.
    """
    most = x.abs().amax(dim)
    n = x.numel() // max(1, most.numel())
    return torch.where(most < UNDERFLOW, n**0.5 * most, torch.linalg.vector_norm(x, dim=dim))


def at_least_near(r: Tensor) -> Tensor:
    """Return a radius or a reach that is large enough to be squared; 0 stays 0."""
    return torch.where(r > 0, r.clamp_min(NEAR), r)


def broadcast_batch(size: Tensor, shape: torch.Size) -> Tensor:
    """Reshape (..., B) to (..., B, 1, ...), which broadcasts against (..., B, *shape)."""
    return size.view(*size.shape, *(1,) * len(shape))


def nan_to_inf(bound: Tensor) -> Tensor:
    """Return the bound, infinite where it is NaN: nothing is known there."""
    return torch.nan_to_num(bound, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
