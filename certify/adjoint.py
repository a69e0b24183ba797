"""The adjoint certificate: the gradient of each margin weighs the second-order remainder of every layer.

Letters: B images, J classes; X_0 -> X_1 = f_1(X_0) -> ... -> X_K the nodes of the model, m_j = <w_y - w_j, X_K> + a
constant; J_k = Df_k at the clean X_{k-1}, R_k its remainder, G_k = X'_k - X_k, g_{k,j} the gradient of m_j at X_k.

    m_j(x') >= m_j(x) - min_c [ ||g_{c,j}|| e_c + sum_{k>c} rem_{k,j}(e_{k-1}) ],         ||G_k|| <= e_k

(Theorem 2 of MATH-PROOFS.md section 1; c = K is the LoFAST test of pairs.) The radii, with D_k = J_k ... J_2 of the
nodes behind the embedding f_1, which is affine:

    e_k = min( lip_k(e_{k-1}),  ||J_k|| e_{k-1} + beta_k(e_{k-1}),  ||D_k|| e_1 + rho_k ),
    rho_k = min( ||J_k|| rho_{k-1} + beta_k(e_{k-1}),  e_k + ||D_k|| e_1 ).

||J_k|| is the norm of I + J_branch, and ||D_k|| that of the product (certify/operator_norms.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from certify.bake import bake
from certify.breakdown import names, shares
from certify.certificate import (
    Breakdown,
    Certificate,
    Clean,
    binding_class,
    checked,
    clean_of,
    decide_by,
    gaps,
    of_class,
    pair_weights,
    per_image,
    same_function,
)
from certify.correct import OfCorrect, of_correct
from certify.operator_norms import operator_norms
from zoo.curvature import Expansion, trunk_of
from zoo.rules import Bound

BYTES = 2**31  # memory for the terms of the images that are looked at together, and for those of their rivals
PAIR, RIVAL = 16, 2  # bytes an entry and token, about


@dataclass(frozen=True)
class Step:
    """One node around a clean batch."""

    name: str
    lip: Bound
    beta: Bound
    norm_B: Tensor  # ||J_k||
    prefix_B: Tensor  # ||D_k||


@dataclass(frozen=True)
class Adjoints:
    """One class j_B of every image, going backwards through the nodes."""

    gradients: Sequence[Tensor]  # ||g_{k,j}|| (B,), k = 0 .. K
    remainders: Sequence[Bound]  # e (B,) -> rem_{k,j} (B,), k = 1 .. K

    def losses(self, radii: Sequence[Tensor]) -> Tensor:
        """||g_{c,j}|| e_c + sum_{k>c} rem_{k,j}(e_{k-1}) for every cut c: (K + 1, B). The cuts share their sums."""
        total_B, losses = torch.zeros_like(radii[0]), [_product(self.gradients[-1], radii[-1])]
        for k in range(len(self.remainders) - 1, -1, -1):
            total_B = total_B + self.remainders[k](radii[k])
            losses.append(_product(self.gradients[k], radii[k]) + total_B)
        return torch.stack(losses[::-1]).nan_to_num(nan=torch.inf, posinf=torch.inf)


class AdjointAnalysis:
    """The stored terms of a batch of correct images; every eps is answered from them, without a forward pass.

    A rival is followed backwards when an eps first leaves it open: the closest of every image first, then the second
    closest of those images that have not been refuted, and so on. Most are settled by the test of pairs alone,
    ||w_y - w_j|| e_K, which is the cut c = K.
    """

    def __init__(
        self,
        clean: Clean,
        steps: Sequence[Step],
        weight_BJ: Tensor,
        backwards: Callable[[Tensor], Adjoints],
        failure: float,
        kept: int,
    ) -> None:
        self.clean, self.steps, self.weight_BJ, self.failure, self.kept = clean, steps, weight_BJ, failure, kept
        self.rivals_JB = clean.margin_BJ.argsort(-1)[:, :-1].mT  # the label's own margin is infinite
        self._backwards, self._ranks = backwards, dict[int, Adjoints]()

    def at(self, eps: float | Tensor) -> Certificate:
        eps_B = per_image(eps, self.clean)
        loss_BJ, class_B = self.losses(self.radii(eps_B))
        return decide_by(self.clean, loss_BJ, eps_B, class_B)

    def losses(self, radii: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """What every margin can lose at most (B, J), and the class that decides (B,): of those that were followed
        backwards the one that comes closest to taking over, or has. Once one has, the others are left as they are."""
        loss_BJ = _known(_product(self.weight_BJ, radii[-1][:, None]))
        share_B = torch.zeros_like(radii[0])  # of the margin that the decider takes
        decider_B = binding_class(self.clean, loss_BJ)
        for rank, j_B in enumerate(self.rivals_JB):
            pair_B, margin_B = of_class(loss_BJ, j_B), of_class(self.clean.margin_BJ, j_B)
            asked_B = (share_B < 1) & ~(gaps(margin_B, pair_B) > 0)
            if bool(asked_B.any()):
                masked = [torch.where(asked_B, e_B, 0.0) for e_B in radii]  # a radius of 0 costs nothing
                bound_B = torch.minimum(pair_B, self.adjoints(rank).losses(masked).amin(0))
                loss_BJ = loss_BJ.scatter(1, j_B[:, None], torch.where(asked_B, bound_B, pair_B)[:, None])
                now_B = torch.where(gaps(margin_B, bound_B) > 0, bound_B / margin_B, torch.inf)
                decides_B = asked_B & (now_B > share_B)
                share_B, decider_B = torch.where(decides_B, now_B, share_B), torch.where(decides_B, j_B, decider_B)
        return loss_BJ, decider_B

    def adjoints(self, rank: int) -> Adjoints:
        """Those of every image's rival of this rank, 0 the closest; made when they are asked for, and the first `kept`
        of them remembered."""
        found = self._ranks.get(rank) or self._backwards(self.rivals_JB[rank])
        if rank < self.kept:
            self._ranks[rank] = found
        return found

    def radii(self, eps_B: Tensor) -> list[Tensor]:
        """e_0 .. e_K (B,). A bound that is not a number counts as infinite."""
        radii, rho_B = [eps_B], torch.zeros_like(eps_B)
        for k, step in enumerate(self.steps):
            e_B = radii[-1]
            beta_B = step.beta(e_B)
            bound_B = torch.fmin(step.lip(e_B), _product(step.norm_B, e_B) + beta_B)
            if k == 0:  # affine: rho_1 = 0
                radii.append(_known(bound_B))
                continue
            linear_B = _product(step.prefix_B, radii[1])
            rho_B = _known(_product(step.norm_B, rho_B) + beta_B)
            bound_B = _known(torch.fmin(bound_B, linear_B + rho_B))
            rho_B = torch.fmin(rho_B, bound_B + linear_B)
            radii.append(bound_B)
        return radii

    def breakdown(self, eps: float | Tensor) -> Breakdown:
        """The share of every node's remainder, and of the gradient at the image, in the loss of the binding class."""
        radii = self.radii(per_image(eps, self.clean))
        _, binding_B = self.losses(radii)
        rank_B = (self.rivals_JB == binding_B).int().argmax(0)
        gradients = torch.zeros(len(radii), len(binding_B), dtype=torch.float64, device=binding_B.device)
        remainders = torch.zeros_like(gradients[1:])
        for rank in rank_B.unique().tolist():
            adjoints, here_B = self.adjoints(rank), rank_B == rank
            gradients[:, here_B] = torch.stack(list(adjoints.gradients))[:, here_B]
            for k, remainder in enumerate(adjoints.remainders):
                remainders[k, here_B] = remainder(radii[k])[here_B]
        return shares([step.name for step in self.steps], gradients, radii, remainders)


def _product(factor: Tensor, radius: Tensor) -> Tensor:
    """factor * radius, where 0 times infinity is 0: a vanishing gradient or map lets nothing through."""
    return torch.where((factor == 0) | (radius == 0), 0.0, factor * radius)


def _known(bound: Tensor) -> Tensor:
    return torch.where(torch.isnan(bound), torch.inf, bound)


class Adjoint:
    """The certifier of one model: weights are measured once, here; images by `analyse`; eps by `AdjointAnalysis.at`.

    Raises NoRule for a model with a module that has no rule of first or of second order.
    """

    def __init__(self, model: nn.Module) -> None:
        self.baked = bake(model)
        self.nodes, self.head = trunk_of(self.baked)
        self.names = names(self.baked, [layer for layer, _ in self.nodes])

    @torch.no_grad()
    def analyse(self, images_BCHW: Tensor, labels_B: Tensor) -> OfCorrect:
        """images (B, C, H, W) in [0,1], labels (B,) of the model's classes."""
        images, labels = checked(images_BCHW, labels_B, self.head)
        clean = clean_of(self.baked(images), labels)
        few = max(1, BYTES // self._bytes(images[:1], PAIR)) if len(images) else 1
        return of_correct(clean, few, lambda index_I: self.expand(images[index_I], clean[index_I]))

    def _bytes(self, images_BCHW: Tensor, each: int) -> int:
        """Memory for `each` bytes a node, entry and token: of attention, pairs of tokens have a vector each."""
        y = self.nodes[0][0](images_BCHW)[0]
        return each * len(self.nodes) * y.numel() * (y.shape[1] if y.ndim == 3 else 1)

    def expand(self, images_BCHW: Tensor, clean: Clean) -> AdjointAnalysis:
        """The terms of these images, float64, all of them correct."""
        x, lips, expansions = images_BCHW, [], []
        for layer, expand in self.nodes:
            lips.append(layer(x)[1])
            expansions.append(expand(x))
            x = expansions[-1].y
        same_function(self.head(x), clean)
        norms = operator_norms(expansions, images_BCHW)
        terms = zip(self.names, lips, expansions, norms.nodes, norms.products, strict=True)
        steps = [Step(name, lip, known.beta, norm_B, prefix_B) for name, lip, known, norm_B, prefix_B in terms]
        own_BD, weight_JD = self.head.weight[clean.label_B], self.head.weight
        return AdjointAnalysis(
            clean,
            steps,
            pair_weights(self.head, clean.label_B),
            lambda j_B: _backwards(expansions, own_BD - weight_JD[j_B], x),
            norms.failure,
            kept=max(1, BYTES // self._bytes(images_BCHW, RIVAL)),
        )


@torch.no_grad()
def _backwards(expansions: Sequence[Expansion], g_BD: Tensor, x: Tensor) -> Adjoints:
    """The gradients of one margin, which is <g, X_K> at the last node, and what they make of the remainders."""
    g = g_BD.view(1, *x.shape)  # one class
    gradients, remainders = [_length(g)], []
    for expansion in reversed(expansions):
        remainders.append(_of_one_class(expansion.remainder(g)))
        g = expansion.pull(g)
        gradients.append(_length(g))
    return Adjoints(gradients[::-1], remainders[::-1])


def _of_one_class(remainder: Bound) -> Bound:
    return lambda e_B: remainder(e_B[None])[0]


def _length(g: Tensor) -> Tensor:
    """(1, B, ...) -> (B,)."""
    return torch.linalg.vector_norm(g.flatten(2), dim=-1)[0]
