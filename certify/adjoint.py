"""The adjoint certificate: the gradient of each margin weighs the second-order remainder of every layer.

Letters: B images, J classes; X_0 -> X_1 = f_1(X_0) -> ... -> X_K the nodes of the model, m_j = <w_y - w_j, X_K> + a
constant; J_k = Df_k at the clean X_{k-1}, R_k its remainder, G_k = X'_k - X_k, g_{k,j} the gradient of m_j at X_k.

    m_j(x') >= m_j(x) - min_c [ ||g_{c,j}|| e_c + sum_{k>c} rem_{k,j}(e_{k-1}) ],         ||G_k|| <= e_k

(Theorem 2 of MATH-PROOFS.md section 1; c = K is the LoFAST test of pairs.) The radii, with D_k = J_k ... J_2 of the
nodes behind the embedding f_1, which is affine:

    e_k = min( lip_k(e_{k-1}),  ||J_k|| e_{k-1} + beta_k(e_{k-1}),  ||D_k|| e_1 + rho_k ),
    rho_k = min( ||J_k|| rho_{k-1} + beta_k(e_{k-1}),  e_k + ||D_k|| e_1 ).

J_k and D_k are dense matrices where they are small, so that ||J_k|| is the norm of I + J_branch and ||D_k|| that of the
product: verified upper bounds (zoo.spectral.sigma_upper). Elsewhere the rules' own gains stand for ||J_k||.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
    decide,
    gaps,
    pair_weights,
    per_image,
)
from zoo.curvature import Expansion, trunk_of
from zoo.rules import Bound
from zoo.spectral import sigma_upper

DENSE_LIMIT = 2048  # entries of X_k up to which J_k is a dense matrix
PULL_BYTES = 2**28  # memory for the rows of a Jacobian that are computed at a time


@dataclass(frozen=True)
class Step:
    """One node around a clean batch."""

    name: str
    lip: Bound
    beta: Bound
    norm_B: Tensor  # ||J_k||
    prefix_B: Tensor  # ||D_k||; infinite where D_k is not known


@dataclass(frozen=True)
class Adjoints:
    """One class j, going backwards through the nodes."""

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
    """The stored terms of a batch; every eps is answered from them, without a forward pass.

    A class is followed backwards, by `backwards(j)`, when an eps first leaves it open: most classes are settled by the
    test of pairs alone, ||w_y - w_j|| e_K, which is the cut c = K.
    """

    def __init__(
        self, clean: Clean, steps: Sequence[Step], weight_BJ: Tensor, backwards: Callable[[int], Adjoints]
    ) -> None:
        self.clean, self.steps, self.weight_BJ = clean, steps, weight_BJ
        self._backwards, self._classes = backwards, dict[int, Adjoints]()

    def at(self, eps: float | Tensor) -> Certificate:
        eps_B = per_image(eps, self.clean)
        return decide(self.clean, self.losses(self.radii(eps_B)), eps_B)

    def losses(self, radii: Sequence[Tensor]) -> Tensor:
        """What every margin can lose at most: (B, J). An image is left as it is once one class has refuted it."""
        loss_BJ = _known(_product(self.weight_BJ, radii[-1][:, None]))
        rival_BJ = self.clean.correct_B[:, None] & torch.isfinite(self.clean.margin_BJ)
        open_BJ = rival_BJ & ~(gaps(self.clean, loss_BJ) > 0)
        alive_B = self.clean.correct_B
        for j in self.clean.margin_BJ.amin(0).argsort().tolist():  # the closest rivals first
            asked_B = open_BJ[:, j] & alive_B
            if bool(asked_B.any()):
                masked = [torch.where(asked_B, e_B, 0.0) for e_B in radii]  # a radius of 0 costs nothing
                adjoint_B = self.adjoints(j).losses(masked).amin(0)
                loss_BJ[:, j] = torch.where(asked_B, torch.minimum(loss_BJ[:, j], adjoint_B), loss_BJ[:, j])
                alive_B = alive_B & (~asked_B | (gaps(self.clean, loss_BJ)[:, j] > 0))
        return loss_BJ

    def adjoints(self, j: int) -> Adjoints:
        """Those of class j, made when they are first asked for."""
        if j not in self._classes:
            self._classes[j] = self._backwards(j)
        return self._classes[j]

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
        binding_B = binding_class(self.clean, self.losses(radii))
        gradients = torch.zeros(len(radii), *self.weight_BJ.mT.shape, dtype=torch.float64, device=binding_B.device)
        remainders = torch.zeros_like(gradients[1:])
        margin_BJ = torch.full_like(self.clean.margin_BJ, 1e300)  # other classes bind nowhere
        for j in binding_B.unique().tolist():
            adjoints, margin_BJ[:, j] = self.adjoints(j), self.clean.margin_BJ[:, j]
            gradients[:, j] = torch.stack(list(adjoints.gradients))
            for k, remainder in enumerate(adjoints.remainders):
                remainders[k, j] = remainder(radii[k])
        only = replace(self.clean, margin_BJ=margin_BJ)
        return shares(only, [step.name for step in self.steps], list(gradients), radii, list(remainders))


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
    def analyse(self, images_BCHW: Tensor, labels_B: Tensor) -> AdjointAnalysis:
        """images (B, C, H, W) in [0,1], labels (B,) of the model's classes."""
        images, labels = checked(images_BCHW, labels_B, self.head)
        x, lips, expansions = images, [], []
        for layer, expand in self.nodes:
            lips.append(layer(x)[1])
            expansions.append(expand(x))
            x = expansions[-1].y
        logits_BJ = self.head(x)
        # The chain of rules and the model must be one function, or the rules speak of another model.
        torch.testing.assert_close(logits_BJ, self.baked(images), rtol=1e-9, atol=1e-9)
        terms = zip(self.names, lips, expansions, *_jacobian_norms(expansions), strict=True)
        steps = [Step(name, lip, known.beta, norm_B, prefix_B) for name, lip, known, norm_B, prefix_B in terms]
        weight_JD = self.head.weight
        return AdjointAnalysis(
            clean_of(logits_BJ, labels),
            steps,
            pair_weights(self.head, labels),
            lambda j: _backwards(expansions, weight_JD[labels] - weight_JD[j], x),
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


def _jacobian_norms(expansions: Sequence[Expansion]) -> tuple[list[Tensor], list[Tensor]]:
    """||J_k|| and ||D_k|| of every node."""
    first = expansions[0]
    infinite_B = torch.full_like(first.gain_B, torch.inf)
    norms, prefixes = [first.gain_B], [infinite_B]
    prefix_BMN: Tensor | None = None  # D_k, once there is one
    known = True  # whether D_{k-1} is: the identity behind the embedding, or `prefix_BMN`
    size = first.y[0].numel()
    for expansion in expansions[1:]:
        if max(size, expansion.y[0].numel()) > DENSE_LIMIT:
            known = False
            norms.append(expansion.gain_B)
            prefixes.append(infinite_B)
        else:
            jacobian_BMN = dense_jacobian(expansion)
            # A node that cannot expand (a projection, an SLL layer) needs no norm of its own, only the product's.
            contracts = bool((expansion.gain_B <= 1).all())
            norm_B = expansion.gain_B if contracts else torch.fmin(sigma_upper(jacobian_BMN), expansion.gain_B)
            norms.append(norm_B)
            if known:
                prefix_BMN = jacobian_BMN if prefix_BMN is None else jacobian_BMN @ prefix_BMN
                prefixes.append(sigma_upper(prefix_BMN))
            else:
                prefixes.append(infinite_B)
        size = expansion.y[0].numel()
    return norms, prefixes


def dense_jacobian(expansion: Expansion) -> Tensor:
    """J (B, M, N) of a node, row by row from its pullback."""
    y = expansion.y
    rows = y[0].numel()
    few = max(1, PULL_BYTES // (8 * 8 * y.numel()))
    parts = []
    for start in range(0, rows, few):
        basis_CM = torch.zeros(min(few, rows - start), rows, dtype=y.dtype, device=y.device)
        basis_CM.diagonal(start).fill_(1)
        g = basis_CM.view(-1, 1, *y.shape[1:]).expand(-1, *y.shape)
        parts.append(expansion.pull(g).flatten(2))
    return torch.cat(parts).movedim(0, 1)
