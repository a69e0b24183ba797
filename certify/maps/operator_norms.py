"""||J_k|| of every node of a chain and ||P_k|| of the products P_k = J_k ... J_1: upper bounds, three ways.

    small       J_k and P_k are written out, and their norms verified (zoo.spectral.sigma_upper): proved
    any size    by products with J and J^T, Lanczos (zoo.bounds.lanczos): proved but for a stated chance
    J_k alone   the rules' own gain, where that is 1 or less already: proved

||P_k|| <= ||J_k|| ||P_{k-1}|| will do behind nodes with gain <= 1, such as norms, and between the PRODUCTS that are
measured of a long chain. What torch computes of P_k v is off by a_k |v|, with rho_k the rounding of node k,

    a_k = ||J_k|| a_{k-1} + rho_k (||P_{k-1}|| + a_{k-1}).

Letters: B images, K nodes; S products at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from zoo.arithmetic import U, nan_to_inf
from zoo.bounds import lanczos
from zoo.bounds.contracts import Expansion
from zoo.spectral import sigma_upper

DENSE_LIMIT = 256  # entries of every X_k up to which matrices are written out
PRODUCTS = 8  # products P_k that are measured; their cost is that of all nodes in front of each


@dataclass(frozen=True)
class Norms:
    """Both lists have one (B,) a node."""

    nodes: list[Tensor]
    products: list[Tensor]
    failure: float  # the chance that one of an image's is too small


def operator_norms(expansions: Sequence[Expansion], images_BCHW: Tensor, seed: bytes) -> Norms:
    """Those of all nodes; of the first its rule says the norm. `seed`: of random starts. Proof:
    docs/proofs.md#operator-norms."""
    small = max(expansion.y[0].numel() for expansion in expansions) <= DENSE_LIMIT
    return dense(expansions) if small else random(expansions, images_BCHW, seed)


def dense(expansions: Sequence[Expansion]) -> Norms:
    """Every matrix written out by pushing the unit vectors through the nodes."""
    nodes, products = [expansions[0].gain_B], [expansions[0].gain_B]
    p_NBX, off_B = factor(expansions[0]), torch.zeros_like(expansions[0].gain_B)
    for expansion in expansions[1:]:
        rows = expansion.y[0].numel() ** 0.5
        nodes.append(torch.fmin(expansion.gain_B, sigma_upper(jacobian(expansion)) + rows * expansion.rounding))
        off_B = _off(expansion, nodes[-1], products[-1], off_B)
        p_NBX = expansion.push(p_NBX)
        found_B = sigma_upper(p_NBX.flatten(2).movedim(0, 2)) + len(p_NBX) ** 0.5 * off_B
        products.append(torch.fmin(nodes[-1] * products[-1], nan_to_inf(found_B)))
    return Norms(nodes, products, 0.0)


def _off_of_first(first: Expansion) -> Tensor:
    """a_1, also where J J^T is one product of weights: off by share |A|^2 with share |A| = rho and share >= 4 u."""
    if first.own_gram is None:
        return first.rounding
    return torch.maximum(first.rounding, first.rounding.square() / (4 * U) / first.gain_B.clamp_min(1e-100))


def _off(expansion: Expansion, node_B: Tensor, before_B: Tensor, off_B: Tensor) -> Tensor:
    """a_k of a_{k-1}."""
    return (node_B * off_B + expansion.rounding * (before_B + off_B)) * (1 + 1e-9)


def factor(first: Expansion) -> Tensor:
    """P (N, B, *y), columns first and as many as y has entries, with P P^T >= J J^T: every J delta, |delta| <= 1, is a
    P delta' with |delta'| <= 1. A Cholesky factor of J J^T + s I; s is above the rounding of both (Higham 2002,
    Theorem 10.3)."""
    jacobian_BMN = jacobian(first)
    gram_BMM = jacobian_BMN @ jacobian_BMN.mT
    trace_B = gram_BMM.diagonal(dim1=-2, dim2=-1).sum(-1)
    slack_B = 4 * sum(jacobian_BMN.shape[1:]) * U * trace_B
    rounded_B = jacobian_BMN.shape[1] ** 0.5 * first.rounding  # of all rows together
    slack_B = slack_B + rounded_B * (2 * trace_B.sqrt() + rounded_B)
    gram_BMM.diagonal(dim1=-2, dim2=-1).add_(slack_B[:, None].clamp_min(1e-300))
    return torch.linalg.cholesky(gram_BMM).movedim(2, 0).reshape(-1, *first.y.shape)


def random(expansions: Sequence[Expansion], images_BCHW: Tensor, seed: bytes) -> Norms:
    """Lanczos for the nodes that can expand, and for products up to some of them, those with outputs of one shape at
    once."""
    wide = [k for k, expansion in enumerate(expansions) if k and bool((expansion.gain_B > 1).any())]
    ends = wide[::-1][:: -(-len(wide) // PRODUCTS) or 1][::-1]  # evenly, the last one included
    found: dict[int, Tensor] = {}
    for _, group in groupby(ends, key=lambda k: expansions[k].y.shape):
        found |= _products(expansions, list(group), images_BCHW, seed)
    nodes, products = [expansions[0].gain_B], [expansions[0].gain_B]
    off_B = _off_of_first(expansions[0])
    for k, expansion in enumerate(expansions[1:], start=1):
        nodes.append(expansion.gain_B)
        if k in wide:
            measured_B = _products([expansion], [0], images_BCHW, seed)[0]
            nodes[-1] = torch.fmin(nodes[-1], _sure(measured_B, expansion.rounding))
        off_B = _off(expansion, nodes[-1], products[-1], off_B)
        products.append(nodes[-1] * products[-1])
        if k in ends:
            products[-1] = torch.fmin(products[-1], _sure(found[k], off_B))
    failure = sum(lanczos.chance(expansions[k].y[0].numel()) for k in (*wide, *ends))
    return Norms(nodes, products, failure)


def _sure(norm_B: Tensor, off_B: Tensor) -> Tensor:
    """A norm that was measured by products within off |v| of exact ones; infinite where that is too far."""
    return torch.where(3 * off_B <= lanczos.ROUNDING / 2 * norm_B, norm_B, torch.inf)


def _products(chain: Sequence[Expansion], ends: Sequence[int], images_BCHW: Tensor, seed: bytes) -> dict[int, Tensor]:
    """||P_k|| (B,) of the chain for every k of `ends`, whose outputs have one shape; who asks looks at rounding."""
    room = torch.Size([lanczos.STARTS, *chain[ends[0]].y.shape[1:]])
    start_KBX = lanczos.starts(images_BCHW, room, seed).movedim(1, 0)
    exact = torch.zeros_like(chain[0].gain_B).expand(len(ends), -1)
    found = lanczos.norms(_gram(chain, ends), start_KBX.expand(len(ends), *start_KBX.shape), exact)
    return dict(zip(ends, found, strict=True))


def _gram(chain: Sequence[Expansion], ends: Sequence[int]) -> lanczos.Map:
    """v (S STARTS, B, *y) -> P_s P_s^T v_s with P_s = J_{ends[s]} ... J_0 of the chain: there and back again, the
    vectors of shorter products joining late and leaving early. Tokens have fewer entries than the pixels at the other
    end."""

    def gram(v: Tensor) -> Tensor:
        starts = lanczos.STARTS
        waiting, ended, u = list(v.split(starts)), [], v[:0]
        for k in range(ends[-1], 0, -1):
            if k in ends:
                u = torch.cat([waiting.pop(), u.view(-1, *chain[k].y.shape)])
            u = chain[k].pull(u)
        u = torch.cat([*waiting, u.view(-1, *chain[0].y.shape)])
        for k in range(ends[-1] + 1):
            u = chain[k].push(u) if k else chain[0].gram(u)
            if k in ends:
                ended.append(u[:starts])
                u = u[starts:]
        return torch.cat(ended)

    return gram


def jacobian(expansion: Expansion) -> Tensor:
    """J (B, M, N) of a node, by its pullback."""
    return expansion.pull(unit_vectors(expansion.y)).flatten(2).movedim(0, 1)


def unit_vectors(x_BX: Tensor) -> Tensor:
    """All of them for each image: (B, ...) -> (N, B, ...)."""
    eye_NX = torch.eye(x_BX[0].numel(), dtype=x_BX.dtype, device=x_BX.device).view(-1, 1, *x_BX.shape[1:])
    return eye_NX.expand(-1, *x_BX.shape)
