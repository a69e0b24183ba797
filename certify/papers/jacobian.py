"""The largest singular value of the Jacobian of each block of a model, at clean images (CoViT, section 5).

    x_k = x_{k-1} + F_k(x_{k-1}):      ||J_k||, J_k = I + DF_k, of the block,      ||DF_k|| of its branch alone

The paper considers DF_k. There are three measures, chosen by size and named in the results:

    exact       the norm of the dense matrix, rounded up by a relative 1e-9 (zoo.spectral.sigma_upper)
    upper       sqrt(||J||_1 ||J||_inf) >= ||J||, eq. 16 of the paper, from exact sums of |entries|, row by row
    estimate    power iteration without the matrix, never above the truth: for illustration, not for proofs

Letters: B images, M outputs and N inputs of an image, C rows at a time.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from timm.models.swin_transformer import SwinTransformerBlock
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from certizoo import UserError
from zoo.layers.block import NormFirstBlock, PostNormBlock, PreNormBlock
from zoo.spectral import sigma_upper

Map = Callable[[Tensor], Tensor]
BLOCKS = (PreNormBlock, PostNormBlock, NormFirstBlock, SwinTransformerBlock)
EXACT, UPPER, ESTIMATE = "exact", "upper", "estimate"
DENSE_LIMIT = 2048  # largest number of entries of a block's input for which the matrix is built
SUMS_LIMIT = 2**14  # and for which all its rows are computed, one by one
ROW_BYTES = 2**28  # memory for the activations of the rows that are computed together


class Part(NamedTuple):
    """A module inside a model, with its input for a batch of images."""

    name: str
    module: nn.Module
    x: Tensor


def blocks_of(baked: nn.Module, images_BCHW: Tensor) -> list[Part]:
    """Return the blocks of a float64 model (`bake`) in order. Raises UserError if it has none."""
    names = [name for name, module in baked.named_modules() if type(module) in BLOCKS]
    if not names:
        raise UserError(f"{type(baked).__name__} has no transformer blocks; analyse a ViT or a Swin")
    return parts_of(baked, images_BCHW, names)


def parts_of(baked: nn.Module, images_BCHW: Tensor, names: list[str]) -> list[Part]:
    """Return these modules of a model with their inputs."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, inputs: found.update({name: inputs[0].detach()})

    hooks = [baked.get_submodule(name).register_forward_pre_hook(keep(name)) for name in names]
    try:
        with torch.no_grad():
            baked(images_BCHW.to(next(baked.parameters())))
    finally:
        for hook in hooks:
            hook.remove()
    return [Part(name, baked.get_submodule(name), found[name]) for name in names]


def branch(block: Map) -> Map:
    """Return F(x) = block(x) - x."""
    return lambda x: block(x) - x


def rows(f: Map, x: Tensor) -> Iterator[Tensor]:
    """Yield the Jacobian of every image, a few rows at a time: (C, B, N).

    The output for an image must not depend on the other images.
    """
    with torch.no_grad():
        outputs = f(x)[0].numel()
    few = max(1, ROW_BYTES // (8 * 32 * x.numel()))
    for start in range(0, outputs, few):
        count = min(few, outputs - start)
        copies = x.repeat(count, *(1,) * (x.ndim - 1)).requires_grad_(True)
        y = f(copies).flatten(1).unflatten(0, (count, -1))
        chosen = torch.arange(start, start + count, device=x.device)[:, None, None].expand(-1, len(x), 1)
        (g,) = torch.autograd.grad(y.gather(2, chosen).sum(), copies)
        yield g.flatten(1).unflatten(0, (count, -1))


def dense(f: Map, x: Tensor) -> Tensor:
    """Return J (B, M, N)."""
    return torch.cat(list(rows(f, x))).movedim(0, 1)


def jacobian_norm(f: Map, x: Tensor) -> Tensor:
    """Return ||J||_2 of the dense matrix: (B,), never below it, above by a relative 1e-9."""
    return torch.stack([sigma_upper(dense(f, one[None])[0]) for one in x])


def jacobian_upper(f: Map, x: Tensor) -> Tensor:
    """Return sqrt(||J||_1 ||J||_inf) >= ||J||_2, eq. 16 of CoViT: (B,). The matrix is never stored.

    Proof: docs/proofs.md#paper-jacobian.
    """
    column_BN, row_B = torch.zeros_like(x).flatten(1), x.new_zeros(len(x))
    for some_CBN in rows(f, x):
        column_BN += some_CBN.abs().sum(0)
        row_B = torch.maximum(row_B, some_CBN.abs().sum(-1).amax(0))
    return (column_BN.amax(-1) * row_B).sqrt()


def jacobian_estimate(f: Map, x: Tensor, iterations: int = 30) -> Tensor:
    """Estimate ||J||_2 by power iteration on J^T J: (B,), never above it (up to rounding).

    J v is the gradient of <J^T u, v> in u, which needs second derivatives. The fused attention kernels have none, so
    the plain one runs.
    """
    x = x.detach().requires_grad_(True)
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype).to(x.device)
    sigma_B = x.new_zeros(len(x))
    with sdpa_kernel(SDPBackend.MATH):
        y = f(x)
        u = torch.zeros_like(y, requires_grad=True)
        (pulled,) = torch.autograd.grad(y, x, u, create_graph=True)
    for _ in range(iterations):
        v = v / _length(v).clamp_min(1e-300)
        (pushed,) = torch.autograd.grad(pulled, u, v, retain_graph=True)
        sigma_B = _length(pushed).flatten()
        (v,) = torch.autograd.grad(y, x, pushed, retain_graph=True)
    return sigma_B.detach()


def _length(x: Tensor) -> Tensor:
    """Return the length of each image's vector: (B, ...) -> (B, 1, ...)."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1).view(-1, *(1,) * (x.ndim - 1))


def measure(f: Map, x: Tensor) -> tuple[Tensor, str]:
    """Return sigma_max of J (B,) by the best measure that the size allows, and the name of that measure."""
    size = x[0].numel()
    if size <= DENSE_LIMIT:
        return jacobian_norm(f, x), EXACT
    if size <= SUMS_LIMIT:
        return jacobian_upper(f, x), UPPER
    return jacobian_estimate(f, x), ESTIMATE
