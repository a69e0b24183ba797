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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from certify.bake import bake
from certify.breakdown import names, shares
from certify.certificate import Breakdown, Certificate, Clean, checked, clean_of, decide, per_image
from zoo.curvature import Expansion, trunk_of
from zoo.rules import Bound
from zoo.spectral import sigma_upper

DENSE_LIMIT = 2048  # entries of X_k up to which J_k is a dense matrix
PULL_BYTES = 2**28  # memory for the rows of a Jacobian that are computed at a time


@dataclass(frozen=True)
class Step:
    """One node around a clean batch."""

    lip: Bound
    beta: Bound
    norm_B: Tensor  # ||J_k||
    prefix_B: Tensor  # ||D_k||; infinite where D_k is not known
    remainder: Bound  # e (J or 1, B) -> rem_{k,j} (J, B)
    gradient_JB: Tensor  # ||g_{k,j}|| behind the node


@dataclass(frozen=True)
class AdjointAnalysis:
    """The stored terms of a batch; every eps is answered from them, without a forward pass."""

    clean: Clean
    steps: Sequence[Step]
    gradient_JB: Tensor  # ||g_{0,j}||
    names: Sequence[str]  # of the nodes

    def at(self, eps: float | Tensor) -> Certificate:
        eps_B = per_image(eps, self.clean)
        radii = self.radii(eps_B)
        # From the last cut, behind all nodes, to the first: the losses of all cuts share their sums.
        remainders = torch.zeros_like(self.gradient_JB)
        loss_JB = torch.full_like(self.gradient_JB, torch.inf)
        for k in range(len(self.steps), -1, -1):
            if k < len(self.steps):
                remainders = remainders + self.steps[k].remainder(radii[k][None])
            loss_JB = torch.fmin(loss_JB, _product(self.gradients[k], radii[k]) + remainders)
        return decide(self.clean, loss_JB.mT, eps_B)

    @property
    def gradients(self) -> list[Tensor]:
        """||g_{0,j}||, ..., ||g_{K,j}|| (J, B)."""
        return [self.gradient_JB, *(step.gradient_JB for step in self.steps)]

    def breakdown(self, eps: float | Tensor) -> Breakdown:
        """The share of every node's remainder, and of the gradient at the image, in the loss."""
        radii = self.radii(per_image(eps, self.clean))
        remainders = [step.remainder(e_B[None]) for step, e_B in zip(self.steps, radii, strict=False)]
        return shares(self.clean, self.names, self.gradients, radii, remainders)

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
        norms, prefixes = _jacobian_norms(expansions)
        gradients, remainders = _backwards(expansions, self.head.weight, labels, x)
        return AdjointAnalysis(
            clean_of(logits_BJ, labels),
            [
                Step(lip, expansion.beta, norm_B, prefix_B, remainder, gradient_JB)
                for lip, expansion, norm_B, prefix_B, remainder, gradient_JB in zip(
                    lips, expansions, norms, prefixes, remainders, gradients[1:], strict=True
                )
            ],
            gradients[0],
            self.names,
        )


def _backwards(
    expansions: Sequence[Expansion], weight_JD: Tensor, labels_B: Tensor, x_BD: Tensor
) -> tuple[list[Tensor], list[Bound]]:
    """||g_{0,j}||, ..., ||g_{K,j}|| (J, B) and the remainders of the nodes, by one pass backwards for all classes."""
    g = (weight_JD[labels_B] - weight_JD[:, None]).reshape(len(weight_JD), *x_BD.shape)
    gradients, remainders = [_length(g)], []
    for expansion in reversed(expansions):
        remainders.append(expansion.remainder(g))
        g = expansion.pull(g)
        gradients.append(_length(g))
    return gradients[::-1], remainders[::-1]


def _length(g: Tensor) -> Tensor:
    """(J, B, ...) -> (J, B)."""
    return torch.linalg.vector_norm(g.flatten(2), dim=-1)


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
            norms.append(torch.fmin(sigma_upper(jacobian_BMN), expansion.gain_B))
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
