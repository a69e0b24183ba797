"""LoFAST certificates: the radius of the perturbation is passed on from layer to layer (paper 004, Theorem 1).

Letters: B images, J classes; y the label, m_j = logit_y - logit_j, W = (w_j) the head, e the radius before the head.

    ||x' - x||_2 <= eps  =>  ||h(x') - h(x)||_2 <= e(eps)  =>  m_j(x') >= m_j(x) - ||w_y - w_j||_2 e(eps)

The last step compares classes in pairs (erratum D9); it is never worse than the paper's sqrt(2) ||W|| e.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from certify.bake import bake
from zoo.rules import Bound, classifier_of

# Every quantity is computed in float64 with a relative error far below 1e-11 (sums of fewer than 1e5 terms, depth
# below 100); the margin has to exceed the loss by this much more, relative to the terms compared.
SLACK = 1e-9


@dataclass(frozen=True)
class Certificate:
    """Per image, for one eps: certified only if correct and margin > loss + slack. All tensors are (B,)."""

    eps_B: Tensor
    margin_B: Tensor  # m_j for the class j that binds
    loss_B: Tensor  # how much of it the ball can cost at most; infinite where the bound overflowed
    correct_B: Tensor
    certified_B: Tensor
    unknown_B: Tensor  # correct, but the bound is not a finite number


@dataclass(frozen=True)
class Analysis:
    """What is known of a batch of images before an eps is chosen; any number of eps may be asked of it."""

    prediction_B: Tensor
    label_B: Tensor
    margin_BJ: Tensor  # m_j; infinite for j = y
    weight_BJ: Tensor  # ||w_y - w_j||
    radius: Bound  # eps -> e(eps)

    @property
    def correct_B(self) -> Tensor:
        return self.margin_BJ.amin(-1) > 0

    def at(self, eps: float | Tensor) -> Certificate:
        """The certificate for one eps, or one eps per image (B,)."""
        eps_B = torch.as_tensor(eps, dtype=torch.float64, device=self.margin_BJ.device).expand(len(self.label_B))
        e_B = self.radius(eps_B)
        e_B = torch.where(torch.isfinite(e_B), e_B, torch.full_like(e_B, torch.inf))
        loss_BJ = torch.where(self.weight_BJ > 0, self.weight_BJ * e_B[:, None], 0.0)
        gap_BJ = self.margin_BJ - loss_BJ - SLACK * (1 + self.margin_BJ.abs() + loss_BJ)
        own_BJ = torch.zeros_like(gap_BJ, dtype=torch.bool).scatter_(1, self.label_B[:, None], True)
        worst_B1 = gap_BJ.masked_fill(own_BJ, torch.inf).argmin(-1, keepdim=True)
        margin_B, loss_B = (t.gather(1, worst_B1).squeeze(1) for t in (self.margin_BJ, loss_BJ))
        gap_B = gap_BJ.gather(1, worst_B1).squeeze(1)
        return Certificate(
            eps_B=eps_B,
            margin_B=margin_B,
            loss_B=loss_B,
            correct_B=self.correct_B,
            certified_B=self.correct_B & (gap_B > 0),
            unknown_B=self.correct_B & ~torch.isfinite(loss_B),
        )


class LoFAST:
    """The certifier of one model: weights are measured once, here; images by `analyse`; eps by `Analysis.at`.

    Raises NoRule for a model with a module that has no rule.
    """

    def __init__(self, model: nn.Module) -> None:
        self.baked = bake(model)
        self.trunk, self.head = classifier_of(self.baked)

    @torch.no_grad()
    def analyse(self, images_BCHW: Tensor, labels_B: Tensor) -> Analysis:
        """images (B, C, H, W) in [0,1], labels (B,) of the model's classes."""
        device = self.head.weight.device
        images, labels = images_BCHW.to(device).double(), labels_B.to(device).long()
        _check(images, labels, self.head.out_features)
        pooled_BD, radius = self.trunk(images)
        logits_BJ = self.head(pooled_BD)
        # The chain of rules and the model must be one function, or the rules speak of another model.
        torch.testing.assert_close(logits_BJ, self.baked(images), rtol=1e-9, atol=1e-9)
        own_BJ = torch.zeros_like(logits_BJ, dtype=torch.bool).scatter_(1, labels[:, None], True)
        margin_BJ = (logits_BJ.gather(1, labels[:, None]) - logits_BJ).masked_fill(own_BJ, torch.inf)
        weight = self.head.weight
        weight_BJ = torch.linalg.vector_norm(weight[labels][:, None] - weight, dim=-1)
        return Analysis(logits_BJ.argmax(-1), labels, margin_BJ, weight_BJ, radius)


def _check(images_BCHW: Tensor, labels_B: Tensor, classes: int) -> None:
    if images_BCHW.ndim != 4 or labels_B.shape != images_BCHW.shape[:1]:
        raise ValueError(
            f"images must be (B, C, H, W) and labels (B,); got {tuple(images_BCHW.shape)}, {tuple(labels_B.shape)}"
        )
    if not bool(((images_BCHW >= 0) & (images_BCHW <= 1)).all()):
        raise ValueError("images must lie in [0,1]; the model normalises them itself")
    if not bool(((labels_B >= 0) & (labels_B < classes)).all()):
        raise ValueError(f"labels must lie in 0..{classes - 1}")


METHODS: dict[str, Callable[[nn.Module], LoFAST]] = {"lofast": LoFAST}
