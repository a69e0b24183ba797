"""Upper bounds of ||J_k|| of every node of a chain and of ||P_k|| of the products P_k = J_k ... J_1, in three ways.

    small       J_k and P_k are written out, and their norms verified (zoo.spectral.sigma_upper): proved
    any size    by products with J and J^T, Lanczos (zoo.bounds.lanczos): proved up to a stated probability
    J_k alone   the rules' own gain, where that is 1 or less already: proved

||P_k|| <= ||J_k|| ||P_{k-1}|| is used after nodes with gain <= 1, such as norms, and in a long chain between the
PRODUCTS that are measured. The error of torch's P_k v is at most a_k |v|, with rho_k the rounding of node k,

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

DENSE_LIMIT = 256  # largest number of entries of an X_k for which matrices are written out
PRODUCTS = 8  # number of products P_k that are measured; each costs as much as all nodes before it


@dataclass(frozen=True)
class Norms:
    """The norms of nodes and of products, one (B,) per node in each list."""

    nodes: list[Tensor]
    products: list[Tensor]
    failure: float  # probability that one of an image's norms is too small


def operator_norms(expansions: Sequence[Expansion], images_BCHW: Tensor, seed: bytes) -> Norms:
    """Return the norms of all nodes; that of the first node comes from its rule.

    `seed` is that of the random starts. Proof: docs/proofs.md#operator-norms.
    """
    small = max(expansion.y[0].numel() for expansion in expansions) <= DENSE_LIMIT
    return dense(expansions) if small else random(expansions, images_BCHW, seed)


def dense(expansions: Sequence[Expansion]) -> Norms:
    """Write out every matrix by pushing the unit vectors through the nodes."""
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
    """Return a_1, including the case that J J^T is one product of weights.

    That product has the error share |A|^2 with share |A| = rho and share >= 4 u.
    """
    if first.own_gram is None:
        return first.rounding
    return torch.maximum(first.rounding, first.rounding.square() / (4 * U) / first.gain_B.clamp_min(1e-100))


def _off(expansion: Expansion, node_B: Tensor, before_B: Tensor, off_B: Tensor) -> Tensor:
    """Return a_k from a_{k-1}."""
    return (node_B * off_B + expansion.rounding * (before_B + off_B)) * (1 + 1e-9)


def factor(first: Expansion) -> Tensor:
    """Return P (N, B, *y), columns first and as many as y has entries, with P P^T >= J J^T.

    Every J delta with |delta| <= 1 is then a P delta' with |delta'| <= 1. P is a Cholesky factor of J J^T + s I, with s
    above the rounding of both (Higham 2002, Theorem 10.3).
    """
    jacobian_BMN = jacobian(first)
    gram_BMM = jacobian_BMN @ jacobian_BMN.mT
    trace_B = gram_BMM.diagonal(dim1=-2, dim2=-1).sum(-1)
    slack_B = 4 * sum(jacobian_BMN.shape[1:]) * U * trace_B
    rounded_B = jacobian_BMN.shape[1] ** 0.5 * first.rounding  # of all rows together
    slack_B = slack_B + rounded_B * (2 * trace_B.sqrt() + rounded_B)
    gram_BMM.diagonal(dim1=-2, dim2=-1).add_(slack_B[:, None].clamp_min(1e-300))
    return torch.linalg.cholesky(gram_BMM).movedim(2, 0).reshape(-1, *first.y.shape)


def random(expansions: Sequence[Expansion], images_BCHW: Tensor, seed: bytes) -> Norms:
    """Measure by Lanczos the nodes that can expand, and the products up to some of them.

    Products with outputs of one shape are measured together.
    """
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
    """Return a norm measured by products with errors up to off |v|; infinite where the errors are too large."""
    return torch.where(3 * off_B <= lanczos.ROUNDING / 2 * norm_B, norm_B, torch.inf)


def _products(chain: Sequence[Expansion], ends: Sequence[int], images_BCHW: Tensor, seed: bytes) -> dict[int, Tensor]:
    """Return ||P_k|| (B,) of the chain for every k of `ends`, whose outputs have one shape.

    The caller checks that the rounding is small enough.
    """
    room = torch.Size([lanczos.STARTS, *chain[ends[0]].y.shape[1:]])
    start_KBX = lanczos.starts(images_BCHW, room, seed).movedim(1, 0)
    exact = torch.zeros_like(chain[0].gain_B).expand(len(ends), -1)
    found = lanczos.norms(_gram(chain, ends), start_KBX.expand(len(ends), *start_KBX.shape), exact)
    return dict(zip(ends, found, strict=True))


def _gram(chain: Sequence[Expansion], ends: Sequence[int]) -> lanczos.Map:
    """Return v (S STARTS, B, *y) -> P_s P_s^T v_s with P_s = J_{ends[s]} ... J_0 of the chain.

    Vectors are pulled back and pushed forward again; those of shorter products join late and leave early. The map
    starts at the tokens because they have fewer entries than the pixels at the other end.
    """

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
    """Return J (B, M, N) of a node, by its pullback."""
    return expansion.pull(unit_vectors(expansion.y)).flatten(2).movedim(0, 1)


def unit_vectors(x_BX: Tensor) -> Tensor:
    """Return all unit vectors for each image: (B, ...) -> (N, B, ...)."""
    eye_NX = torch.eye(x_BX[0].numel(), dtype=x_BX.dtype, device=x_BX.device).view(-1, 1, *x_BX.shape[1:])
    return eye_NX.expand(-1, *x_BX.shape)
