"""Arithmetic of bounds in float64: what rounding adds, what 0 times infinity and "not a number" count as, and
numbers of images beside what images are in."""

import torch
from torch import Tensor

U = 2.0**-53  # unit round-off of float64
NEAR, FAR = 2.0**-200, 2.0**200  # radii: smaller ones count as NEAR, larger ones as infinite (docs/proofs.md#range)


def gamma(k: int, unit: float = U) -> float:
    """gamma_k = k u / (1 - k u): the relative error of k roundings, whatever their order (Higham 2002, section 3.1)."""
    return k * unit / (1 - k * unit)


def product(factor: Tensor, bound: Tensor) -> Tensor:
    """factor * bound, where 0 times infinity is 0: what vanishes lets nothing through."""
    return torch.where((factor == 0) | (bound == 0), 0.0, factor * bound)


def beside(size: Tensor, room: torch.Size) -> Tensor:
    """(..., B) -> (..., B, 1, ...), beside (..., B, *room)."""
    return size.view(*size.shape, *(1,) * len(room))


def nan_to_inf(bound: Tensor) -> Tensor:
    """The bound, infinite where it is not a number: nothing is known there."""
    return torch.nan_to_num(bound, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
