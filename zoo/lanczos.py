"""Largest eigenvalues by Lanczos' method: estimates from below (`ritz`), and norms of linear maps that are never
written out, from above with a stated chance to fail (`norms`).

For M = A^T A on R^n and a random start, uniform on the sphere, let theta be the largest eigenvalue of M on the Krylov
space of k vectors. Then (Kuczynski and Wozniakowski 1992, Theorem 4.2; MATH-PROOFS.md section 3), for 0 < delta < 1,

    P[ theta < (1 - delta) lambda_max(M) ]  <=  1.648 sqrt(n) exp(-sqrt(delta) (2 k - 1)),

so that ||A|| <= sqrt( theta / (1 - delta) ) but for that chance, FAILURE here. The start is drawn from a stream that is
seeded by the image, so neither the batch nor the number of processes changes a certificate.

Letters: B images, S maps of one chain, k steps.
"""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

DELTA = 0.1  # the bound is at most 1 / sqrt(1 - DELTA) = 1.054 times the norm
FAILURE = 1e-11  # the chance that one norm is too small
NUDGE = 1e-14
SLACK = 1 + 1e-9  # rounding: of products with A relative 1e-13, of an orthonormal basis of 60 vectors 1e-14
Map = Callable[[Tensor], Tensor]


def steps(n: int) -> int:
    """The least k whose chance to fail is at most FAILURE; a Krylov space of n dimensions is everything."""
    return min(n, math.ceil((math.log(1.648 * math.sqrt(n) / FAILURE) / math.sqrt(DELTA) + 1) / 2))


def starts(images_BCHW: Tensor, shape: torch.Size) -> Tensor:
    """One Gaussian vector (B, *shape) an image, drawn from a stream that its pixels seed."""
    drawn = []
    for image_CHW in images_BCHW:
        pixels = image_CHW.detach().cpu().double().contiguous().numpy().tobytes()
        seed = int.from_bytes(hashlib.sha256(pixels).digest()[:7], "big")
        drawn.append(torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    return torch.stack(drawn).to(images_BCHW.device)


def ritz(apply: Map, start: Tensor, count: int) -> Tensor:
    """The largest eigenvalue of a symmetric map (..., n) -> (..., n) on the span of `count` Krylov vectors: never above
    the map's own. The basis is orthogonalised twice in every step."""
    basis_LKN = start.new_zeros(start[..., 0].numel(), count, start.shape[-1])
    inner_LKK = start.new_zeros(len(basis_LKN), count, count)
    start_LN = start.reshape(len(basis_LKN), start.shape[-1])
    v_LN = normalised(start_LN)
    for k in range(count):
        basis_LKN[:, k] = v_LN
        so_far = basis_LKN[:, : k + 1]
        image_LN = apply(v_LN.view(start.shape)).reshape(start_LN.shape)
        inner_LKK[:, : k + 1, k] = (so_far @ image_LN.unsqueeze(-1)).squeeze(-1)
        # Of an exhausted space only rounding would be left, and that in no free direction: a little of one is added.
        v_LN = normalised(image_LN) + NUDGE * start_LN.roll(k + 1, -1)
        for _ in range(2):
            v_LN = normalised(v_LN - ((so_far @ v_LN.unsqueeze(-1)).mT @ so_far).squeeze(1))
    upper = inner_LKK.triu(1)
    whole = upper + upper.mT + torch.diag_embed(inner_LKK.diagonal(dim1=-2, dim2=-1))
    return torch.linalg.eigvalsh(whole)[..., -1].view(start.shape[:-1])


def normalised(v: Tensor) -> Tensor:
    """v / |v|, and 0 for 0."""
    return v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(1e-300)


def norms(gram: Map, start_BX: Tensor, count: int) -> Tensor:
    """Upper bounds (S, B) of ||A|| for `count` = S maps, gram: v (S, B, ...) -> A^T A v, each with its own start."""
    start = start_BX.expand(count, *start_BX.shape)

    def apply(v_SBN: Tensor) -> Tensor:
        return gram(v_SBN.view(start.shape)).flatten(2)

    theta = ritz(apply, start.flatten(2), steps(start_BX[0].numel()))
    return (theta.clamp_min(0) / (1 - DELTA)).sqrt() * SLACK
