"""||J_k|| of every node of a chain and ||D_k|| of the products D_k = J_k ... J_2: upper bounds, three ways.

    small       J_k and D_k are written out, and their norms verified (zoo.spectral.sigma_upper): proved
    any size    by products with J and J^T, Lanczos (zoo.lanczos): proved but for a stated chance
    J_k alone   the rules' own gain, where that is 1 or less already: proved

Behind nodes with gain < 1, such as norms, ||D_k|| <= gain_k ||D_{k-1}|| will do.

Letters: B images, K nodes; S products at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo import lanczos
from zoo.curvature import Expansion
from zoo.spectral import sigma_upper

DENSE_LIMIT = 256  # entries of every X_k up to which matrices are written out


@dataclass(frozen=True)
class Norms:
    """Both lists have one (B,) a node; the product of the first node, which is affine, is never asked for."""

    nodes: list[Tensor]
    products: list[Tensor]
    failure: float  # the chance that one of an image's is too small


def operator_norms(expansions: Sequence[Expansion], images_BCHW: Tensor) -> Norms:
    """Those of the nodes behind the first."""
    small = max(expansion.y[0].numel() for expansion in expansions) <= DENSE_LIMIT
    return dense(expansions) if small else random(expansions, images_BCHW)


def dense(expansions: Sequence[Expansion]) -> Norms:
    """Every matrix written out by pushing the unit vectors through the nodes."""
    nodes, products = [expansions[0].gain_B], [torch.ones_like(expansions[0].gain_B)]
    unit_NBX = unit_vectors(expansions[0].y)
    for expansion in expansions[1:]:
        jacobian_BMN = jacobian(expansion)
        nodes.append(torch.fmin(expansion.gain_B, sigma_upper(jacobian_BMN)))
        unit_NBX = expansion.push(unit_NBX)
        products.append(sigma_upper(unit_NBX.flatten(2).movedim(0, 2)))
    return Norms(nodes, products, 0.0)


def random(expansions: Sequence[Expansion], images_BCHW: Tensor) -> Norms:
    """Lanczos for nodes that can expand, and for the products behind all that do not contract, at once."""
    chain = expansions[1:]
    start_BX = lanczos.starts(images_BCHW, expansions[0].y.shape[1:])
    free = [bool((expansion.gain_B > 1).any()) for expansion in chain]
    ends = [k for k, expansion in enumerate(chain) if bool((expansion.gain_B >= 1).any())]
    of_ends: Iterable[Tensor] = lanczos.norms(_gram(chain, ends), start_BX, len(ends)) if ends else ()
    product_SB = iter(of_ends)
    nodes, products = [expansions[0].gain_B], [torch.ones_like(expansions[0].gain_B)]
    for k, expansion in enumerate(chain):
        nodes.append(expansion.gain_B)
        products.append(expansion.gain_B * products[-1])
        if free[k]:
            own_BX = lanczos.starts(images_BCHW, chain[k - 1].y.shape[1:]) if k else start_BX
            nodes[-1] = torch.fmin(nodes[-1], lanczos.norms(_gram(chain[k : k + 1], [0]), own_BX, 1)[0])
        if k in ends:
            products[-1] = torch.fmin(products[-1], next(product_SB))
    return Norms(nodes, products, (sum(free) + len(ends)) * lanczos.FAILURE)


def _gram(chain: Sequence[Expansion], ends: Sequence[int]) -> lanczos.Map:
    """v (S, B, ...) -> D_s^T D_s v_s with D_s = J_{ends[s]} ... J_0 of the chain: there and back again, the vectors of
    shorter products leaving early and joining late."""

    def gram(v: Tensor) -> Tensor:
        ended = []
        for k in range(ends[-1] + 1):
            v = chain[k].push(v)
            if k in ends:
                ended.append(v[:1])
                v = v[1:]
        for k in range(ends[-1], -1, -1):
            if k in ends:
                v = torch.cat([ended.pop(), v.view(-1, *chain[k].y.shape)])
            v = chain[k].pull(v)
        return v

    return gram


def jacobian(expansion: Expansion) -> Tensor:
    """J (B, M, N) of a node, by its pullback."""
    return expansion.pull(unit_vectors(expansion.y)).flatten(2).movedim(0, 1)


def unit_vectors(x_BX: Tensor) -> Tensor:
    """All of them for each image: (B, ...) -> (N, B, ...)."""
    eye_NX = torch.eye(x_BX[0].numel(), dtype=x_BX.dtype, device=x_BX.device).view(-1, 1, *x_BX.shape[1:])
    return eye_NX.expand(-1, *x_BX.shape)
