"""What every method answers, and the one comparison that decides.

Letters: B images, J classes; y the label, m_j = logit_y - logit_j.
"""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from certizoo import UserError
from zoo.arithmetic import U, nan_to_inf
from zoo.bounds import running

# Norms, gradients and remainders are computed in float64 with a relative error far below 1e-11 (sums of fewer than 1e5
# terms, depth below 100); the margin has to exceed the loss by this much more, relative to the terms compared. What
# follows the size of activations and logits instead is bounded for itself (zoo/bounds/running.py).
SLACK = 1e-9


class UnsoundCertificate(Exception):
    """An attack changed the class of a certified image: a fault of the prover, to be reported with the image's key."""


@dataclass(frozen=True)
class Certificate:
    """Per image, for one eps: certified only if correct and margin > loss + slack. All tensors are (B,)."""

    eps_B: Tensor
    margin_B: Tensor  # m_j for the class j that binds
    loss_B: Tensor  # how much of it the ball can cost at most; infinite where the bound overflowed, or was not needed
    correct_B: Tensor
    certified_B: Tensor
    unknown_B: Tensor  # correct, but the bound is not a finite number


@dataclass(frozen=True)
class Clean:
    """What the model says of a batch of clean images."""

    prediction_B: Tensor
    label_B: Tensor
    margin_BJ: Tensor  # m_j; infinite for j = y

    @property
    def correct_B(self) -> Tensor:
        return self.margin_BJ.amin(-1) > 0

    def __getitem__(self, index_I: Tensor) -> "Clean":
        """That of some of the images."""
        return Clean(self.prediction_B[index_I], self.label_B[index_I], self.margin_BJ[index_I])


class Analysis(Protocol):
    """What is known of a batch of images before an eps is chosen; any number of eps may be asked of it."""

    @property
    def clean(self) -> Clean: ...

    @property
    def failure(self) -> float:
        """The chance that a bound of one image is no bound: 0 unless norms were found by a random method."""
        ...

    def at(self, eps: float | Tensor) -> Certificate:
        """The certificate for one eps, or one eps per image (B,)."""
        ...


@dataclass(frozen=True)
class Breakdown:
    """What every step of a model costs at one eps, image by image, in one of two quantities:

    growth   e_k / e_{k-1}: by how much the step widens the radius; their product is e_K / eps
    share    the step's part of the loss of the class that binds; they add up to 1
    """

    quantity: str
    costs: dict[str, Tensor]  # name of the step -> (B,), in the order of the chain


@runtime_checkable
class Explained(Analysis, Protocol):
    """An analysis that can also say which step of the model costs how much; no method has to."""

    def breakdown(self, eps: float | Tensor) -> Breakdown: ...


class Certifier(Protocol):
    """One method for one model, whose weights are measured once. `baked` is the function that is certified."""

    baked: nn.Module

    def analyse(self, images_BCHW: Tensor, labels_B: Tensor) -> Analysis:
        """images (B, C, H, W) in [0,1], labels (B,) of the model's classes."""
        ...


def checked(images_BCHW: Tensor, labels_B: Tensor, head: nn.Linear) -> tuple[Tensor, Tensor]:
    """Both on the device of the model, as float64 and integers. Raises ValueError where they are not what they should
    be."""
    images, labels = images_BCHW.to(head.weight.device).double(), labels_B.to(head.weight.device).long()
    if images.ndim != 4 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"images must be (B, C, H, W) and labels (B,); got {tuple(images.shape)}, {tuple(labels.shape)}"
        )
    if not bool(((images >= 0) & (images <= 1)).all()):
        raise ValueError("images must lie in [0,1]; the model normalises them itself")
    if not bool(((labels >= 0) & (labels < head.out_features)).all()):
        raise ValueError(f"labels must lie in 0..{head.out_features - 1}")
    return images, labels


def clean_of(logits_BJ: Tensor, labels_B: Tensor) -> Clean:
    """Margins of the label over every other class."""
    own_BJ = torch.zeros_like(logits_BJ, dtype=torch.bool).scatter_(1, labels_B[:, None], True)
    margin_BJ = (logits_BJ.gather(1, labels_B[:, None]) - logits_BJ).masked_fill(own_BJ, torch.inf)
    return Clean(logits_BJ.argmax(-1), labels_B, margin_BJ)


def same_function(logits_BJ: Tensor, clean: Clean) -> None:
    """The chain of rules and the model must be one function, or the rules speak of another model."""
    margin_BJ = clean_of(logits_BJ, clean.label_B).margin_BJ
    off_BJ = (margin_BJ - clean.margin_BJ).masked_fill(_own(clean), 0.0).abs()
    rounding_B1 = 1e-12 * logits_BJ.abs().amax(1, keepdim=True)
    if not bool((off_BJ <= 1e-9 * (1 + margin_BJ.abs()) + rounding_B1).all()):
        raise UserError(
            f"the chain of rules and the model are not one function (margins off by {float(off_BJ.max()):.3g}); look "
            "for huge offsets in biases, or for a module whose rule is of another function"
        )


def lowered(head: nn.Module, x: Tensor, clean: Clean) -> Clean:
    """With margins that are never above those of the exact head at x: the two logits of each may be off by what was
    rounded, and so may their difference. Proof: docs/proofs.md#slack."""
    logits_BJ = head(x)
    same_function(logits_BJ, clean)
    error_BJ = running.RESERVE * running.defect(head, x, logits_BJ)
    margin_BJ = clean_of(logits_BJ, clean.label_B).margin_BJ
    off_BJ = error_BJ + error_BJ.gather(1, clean.label_B[:, None]) + U * margin_BJ.abs()
    return replace(clean, margin_BJ=(margin_BJ - off_BJ).masked_fill(_own(clean), torch.inf))


def pair_weights(head: nn.Linear, labels_B: Tensor) -> Tensor:
    """||w_y - w_j|| of the label and every class: (B, J). Proof: docs/proofs.md#pairwise-margin."""
    return torch.linalg.vector_norm(head.weight[labels_B][:, None] - head.weight, dim=-1)


def per_image(eps: float | Tensor, clean: Clean) -> Tensor:
    """eps (B,) in float64."""
    return torch.as_tensor(eps, dtype=torch.float64, device=clean.margin_BJ.device).expand(len(clean.label_B))


def decide(clean: Clean, loss_BJ: Tensor, eps_B: Tensor) -> Certificate:
    """Certified where the label keeps its margin over every class, outward slack included. A loss that is not a number
    counts as infinite. Proof: docs/proofs.md#slack."""
    loss_BJ = nan_to_inf(loss_BJ)
    return decide_by(clean, loss_BJ, eps_B, binding_class(clean, loss_BJ))


def decide_by(clean: Clean, loss_BJ: Tensor, eps_B: Tensor, class_B: Tensor) -> Certificate:
    """The same, with one class of each image to be reported."""
    open_BJ = ~(gaps(clean.margin_BJ, loss_BJ) > 0) & ~_own(clean)
    margin_B, loss_B = of_class(clean.margin_BJ, class_B), of_class(loss_BJ, class_B)
    return Certificate(
        eps_B=eps_B,
        margin_B=margin_B,
        loss_B=loss_B,
        correct_B=clean.correct_B,
        certified_B=clean.correct_B & ~open_BJ.any(-1),
        unknown_B=clean.correct_B & ~torch.isfinite(loss_B),
    )


def of_class(values_BJ: Tensor, class_B: Tensor) -> Tensor:
    """(B, J) -> (B,)."""
    return values_BJ.gather(1, class_B[:, None]).squeeze(1)


def binding_class(clean: Clean, loss_BJ: Tensor) -> Tensor:
    """The class that comes closest to taking over from the label: (B,)."""
    return gaps(clean.margin_BJ, loss_BJ).masked_fill(_own(clean), torch.inf).argmin(-1)


def _own(clean: Clean) -> Tensor:
    return torch.zeros_like(clean.margin_BJ, dtype=torch.bool).scatter_(1, clean.label_B[:, None], True)


def gaps(margin: Tensor, loss: Tensor) -> Tensor:
    """What is left of margins after the losses and the slack; not a number where both are infinite."""
    return margin - loss - SLACK * (1 + margin.abs() + loss)
