"""Hinge on spectral norms, which keeps norms of weights below caps and is zero there (docs/proofs.md#hinge).

    L_hinge = sum_W relu( ||W|| - c_W )^2          W = W_Q, W_K, W_V (all heads together), W_O, W_1, W_2 of every layer,
                                                   the patch embedding, the kernels (out, rest) of a stem, and
                                                   diag(gamma) of every LayerNorm and CenterNorm

The layer after a norm is scaled by its gamma: with W_1 below its cap and gamma free, W_1 diag(gamma) would still grow.
The last kernel of a stem is a patch embedding ("patch"), those before activations are "stem": an activation's remainder
grows with the square of the rows before it, but only in proportion to the kernel after it.

For a kernel of k x k with stride s, the norm of the convolution is at most ceil(k / s) ||W||: a pixel is in that many
patches in either direction.

||W|| comes from Gram iteration (Delattre et al. 2023, https://arxiv.org/abs/2305.16173): with G_0 = W^T W or W W^T,
whichever is smaller, and G_{k+1} = G_k^2,

    ||W|| <= ||G_k||_F^{1 / 2^{k+1}}       (at most a factor n^{1 / 2^{k+2}} above, n the smaller side)

It needs no vectors between steps. Where several singular values are near the cap it reduces all of them, while a power
iteration sees one per step. For a diagonal matrix G_k is diagonal, and all of this is a p-norm of its entries. Grams of
one size are squared in one batch, whatever the shapes of their matrices: for these small products, a GPU spends more
time on the launch than on the product. Like MSVP the hinge steers training; no certificate trusts it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn

from zoo.penalty import HasSpectralTerms

SQUARINGS = 5  # at most 1.04 times the norm for n = 128; 1.00 where one singular value leads

Capped = tuple[float, Tensor, Tensor]  # a cap, the largest entry, and a gram or the entries without it


@runtime_checkable
class HasKernels(Protocol):
    """A convolutional stem."""

    def kernels(self) -> Iterator[Tensor]:
        """Yield the kernels of its convolutions, (out, rest)."""
        ...


@runtime_checkable
class HasGamma(Protocol):
    """A norm of this package whose output is scaled, channel by channel."""

    def gamma(self) -> Tensor:
        """Return the factors (D,)."""
        ...


def hinge(model: nn.Module, caps: Mapping[str, float | None], slack: float = 1.0) -> Tensor:
    """Return the sum above with caps `slack * caps[branch]`; None means no cap.

    Branches are those of `zoo.penalty`, "patch", "stem" and "norm". The result is a float32 scalar, finite for norms up
    to 1e19, whose squares it adds. Raises ValueError for a model without weights of the capped branches.
    """
    groups = defaultdict[torch.Size, list[Capped]](list)
    for module in model.modules():
        for branch, weight in weights(module):
            if (cap := caps.get(branch)) is not None:
                largest, shared = without_size(weight.float())
                measured = gram_of(shared) if weight.ndim == 2 else shared
                groups[measured.shape].append((slack * cap, largest, measured))
    if not groups:
        raise ValueError("the model has no weights of the branches to cap")
    return torch.stack([_excess(terms) for terms in groups.values()]).sum()


def weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the branches of the module itself, with their matrices (N, D); for a diagonal one, its entries (D,)."""
    if isinstance(module, HasSpectralTerms):
        for branch, weight_HOD, _ in module.spectral_terms():
            yield branch, weight_HOD.flatten(0, 1)
    elif isinstance(module, PatchEmbed):
        yield "patch", module.proj.weight.flatten(1)  # not a parameter if it is capped
    elif isinstance(module, HasKernels):
        *nonlinear, last = module.kernels()
        yield from (("stem", kernel) for kernel in nonlinear)
        yield "patch", last
    elif isinstance(module, HasGamma):
        yield "norm", module.gamma()
    elif isinstance(module, nn.LayerNorm) and module.elementwise_affine:
        yield "norm", module.weight


def _excess(terms: list[Capped]) -> Tensor:
    """Return sum_k relu( ||W_k|| - c_k )^2 over K terms of one shape, in one batch."""
    caps, largest, measured = zip(*terms, strict=True)
    together = torch.stack(measured)
    norm_K = torch.stack(largest) * (norm_of_gram(together) if together.ndim == 3 else diagonal_norm(together))
    # A blocking copy would wait for all pending work of the GPU.
    cap_K = torch.tensor(caps).to(norm_K, non_blocking=True)
    return (norm_K - cap_K).clamp_min(0).square().sum()


def without_size(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (m, W / m) for the largest modulus m of the entries, a constant for the gradient.

    The norm is m ||W / m||, and the Gram matrix of W / m neither under- nor overflows.
    """
    largest = weight.detach().abs().amax().clamp_min(torch.finfo(weight.dtype).tiny)
    return largest, weight / largest


def gram_of(weight: Tensor) -> Tensor:
    """Return G_0, of the smaller side: (..., m, n) -> (..., min(m, n), min(m, n))."""
    return weight @ weight.mT if weight.shape[-2] <= weight.shape[-1] else weight.mT @ weight


def norm_of_gram(gram: Tensor) -> Tensor:
    """Return a bound of ||W||_2 for W with this G_0, differentiable: (..., n, n) -> (...,).

    It is never below ||W||_2 except for rounding. Every G_k is divided by its norm. Proof: docs/proofs.md#gram-norm.
    """
    length = torch.linalg.matrix_norm(gram).clamp_min(torch.finfo(gram.dtype).tiny)
    log_norm, power = length.log() / 2, 2.0
    for _ in range(SQUARINGS):
        gram = gram / length[..., None, None]
        gram, power = gram @ gram, 2 * power
        length = torch.linalg.matrix_norm(gram).clamp_min(torch.finfo(gram.dtype).tiny)
        log_norm = log_norm + length.log() / power
    return log_norm.exp()


def diagonal_norm(entries: Tensor) -> Tensor:
    """Return `norm_of_gram` of diag(entries)^2: (..., n) -> (...,)."""
    most = entries.detach().abs().amax(-1).clamp_min(torch.finfo(entries.dtype).tiny)
    return most * torch.linalg.vector_norm(entries / most[..., None], 2 ** (SQUARINGS + 2), dim=-1)
