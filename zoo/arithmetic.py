"""Arithmetic of bounds in float64: what rounding adds, what 0 times infinity and "not a number" count as, and
numbers of images beside what images are in."""

import torch
from torch import Tensor

U = 2.0**-53  # unit round-off of float64
OUT = 1 + 1e-9  # outwards over the rounding of the formulas of a bound themselves
UNDERFLOW = 2.0**-480  # squares of smaller numbers lose digits, or vanish
NEAR, FAR = 2.0**-200, 2.0**200  # radii: smaller ones count as NEAR, larger ones as infinite (docs/proofs.md#range)


def gamma(k: int, unit: float = U) -> float:
    """gamma_k = k u / (1 - k u): the relative error of k roundings, whatever their order (Higham 2002, section 3.1)."""
    return k * unit / (1 - k * unit)


def product(factor: Tensor, bound: Tensor) -> Tensor:
    """factor * bound, where 0 times infinity is 0: what vanishes lets nothing through."""
    return torch.where((factor == 0) | (bound == 0), 0.0, factor * bound)


def length(x: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """|x| along these axes, where its squares underflow sqrt(n) max |x|: never below but for rounding, and 0 for 0
    alone. Proof: docs/proofs.md#range."""
    most = x.abs().amax(dim)
    n = x.numel() // max(1, most.numel())
    return torch.where(most < UNDERFLOW, n**0.5 * most, torch.linalg.vector_norm(x, dim=dim))


def at_least_near(r: Tensor) -> Tensor:
    """A radius or a reach that is large enough to be squared; 0 stays 0."""
    return torch.where(r > 0, r.clamp_min(NEAR), r)


def beside(size: Tensor, room: torch.Size) -> Tensor:
    """(..., B) -> (..., B, 1, ...), beside (..., B, *room)."""
    return size.view(*size.shape, *(1,) * len(room))


def nan_to_inf(bound: Tensor) -> Tensor:
    """The bound, infinite where it is not a number: nothing is known there."""
    return torch.nan_to_num(bound, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
