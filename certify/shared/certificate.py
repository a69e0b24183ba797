"""The answer of every method, and the one comparison that decides it.

Letters: B images, J classes; y the label, m_j = logit_y - logit_j.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from certify.shared.ball import Ball
from certizoo import UserError
from certizoo.inputs import batch_given, extremes, require_classes
from zoo.arithmetic import U, nan_to_inf
from zoo.bounds import float_error

# Norms, gradients and remainders are computed in float64 with a relative error far below 1e-11 (sums of fewer than 1e5
# terms, depth below 100). The margin must exceed the loss by this much more, relative to the terms compared. Errors
# that grow with activations and logits are bounded separately (zoo/bounds/float_error.py).
SLACK = 1e-9


FIRST_RADIUS = 0.05  # radius of the L2 ball at which the search for a radius begins


class UnsoundCertificate(Exception):
    """An attack changed the class of a certified image: the prover is wrong. Report it with the image's key."""


@dataclass(frozen=True)
class Certificate:
    """The answers for one eps: certified only if correct and margin > loss + slack. All tensors are (B,)."""

    eps_B: Tensor
    margin_B: Tensor  # m_j for the class j that binds
    loss_B: Tensor  # the largest fall of that margin on the ball; infinite where the bound overflowed or was not needed
    correct_B: Tensor
    certified_B: Tensor
    unknown_B: Tensor  # correct, but the bound is not a finite number, or the margin is all rounding


@dataclass(frozen=True)
class Clean:
    """The model's answers for a batch of clean images.

    The margins are those of the float64 function, the predictions those of the served model. An image is correct where
    both give its label, as computed: a margin that rounding may have made is no error of the model, but unknown.
    """

    prediction_B: Tensor
    label_B: Tensor
    margin_BJ: Tensor  # m_j; infinite for j = y
    correct_B: Tensor
    require_unchanged: Callable[[], None] = lambda: None  # raises UserError once the model has changed

    def __getitem__(self, index_I: Tensor) -> "Clean":
        """Return the answers for some of the images."""
        parts = ("prediction_B", "label_B", "margin_BJ", "correct_B")
        return replace(self, **{part: getattr(self, part)[index_I] for part in parts})


class Analysis(Protocol):
    """The terms of a batch of images, computed before an eps is chosen.

    It answers any number of eps, all of them radii in the norm of its `ball`.
    """

    @property
    def clean(self) -> Clean: ...

    @property
    def ball(self) -> Ball: ...

    @property
    def failure(self) -> float:
        """The probability that a bound of one image is wrong: 0 unless norms come from a random method."""
        ...

    def at(self, eps: float | Tensor) -> Certificate:
        """Return the certificate for one eps, or for one eps per image (B,)."""
        ...


@runtime_checkable
class Searched(Analysis, Protocol):
    """An analysis with an answer of its own for the search of radii, which asks many eps; optional for a method."""

    def guess(self) -> Tensor:
        """Return for each image an eps at which to begin the search for its radius: (B,)."""
        ...

    def in_search(self, eps: float | Tensor) -> Certificate:
        """Return a certificate as `at` does, from bounds for many eps: once they are made, at hardly any cost.

        It may prove less than `at`.
        """
        ...


@dataclass(frozen=True)
class Breakdown:
    """The cost of every step of a model at one eps, image by image, in one of two quantities.

    growth   e_k / e_{k-1}: by how much the step widens the radius; their product is e_K / e_0
    share    the step's part of the loss of the binding class; they add up to 1
    """

    quantity: str
    costs: dict[str, Tensor]  # name of the step -> (B,), in the order of the chain


@runtime_checkable
class Explained(Analysis, Protocol):
    """An analysis that can also return the cost of each step of the model; optional for a method."""

    def breakdown(self, eps: float | Tensor) -> Breakdown: ...


class Certifier(Protocol):
    """One method for one model, whose weights are measured once. `baked` is the function that is certified."""

    baked: nn.Module

    def analyse(self, images_BCHW: Tensor, labels_B: Tensor) -> Analysis:
        """Analyse images (B, C, H, W) in [0,1] with labels (B,) of the model's classes."""
        ...


def checked(images_BCHW: Tensor, labels_B: Tensor, head: nn.Linear) -> tuple[Tensor, Tensor]:
    """Return both on the model's device, as float64 and integers. Raises UserError for invalid images or labels."""
    images, labels = batch_given(images_BCHW, labels_B)
    require_classes(*extremes(labels), len(head.weight))
    return images.to(head.weight.device).double(), labels.to(head.weight.device)


def margins_of(logits_BJ: Tensor, labels_B: Tensor) -> Tensor:
    """Return the margins m_j (B, J), infinite for the label."""
    own_BJ = torch.zeros_like(logits_BJ, dtype=torch.bool).scatter_(1, labels_B[:, None], True)
    return (logits_BJ.gather(1, labels_B[:, None]) - logits_BJ).masked_fill(own_BJ, torch.inf)


def margin_rows(label_B: Tensor, logits: Tensor) -> Tensor:
    """Return the rows e_y - e_j of all margins, 0 for the label's own (B, J, J), in the type of `logits` (..., J)."""
    identity = torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    return identity[label_B].unsqueeze(1) - identity


def same_function(logits_BJ: Tensor, clean: Clean) -> None:
    """Raise UserError unless the chain of rules and the model compute the same margins."""
    margin_BJ = margins_of(logits_BJ, clean.label_B)
    off_BJ = (margin_BJ - clean.margin_BJ).masked_fill(_own(clean), 0.0).abs()
    rounding_B1 = 1e-12 * logits_BJ.abs().amax(1, keepdim=True)
    if not bool((off_BJ <= 1e-9 * (1 + margin_BJ.abs()) + rounding_B1).all()):
        raise UserError(
            f"the chain of rules and the model are not one function (margins off by {float(off_BJ.max()):.3g}); look "
            "for huge offsets in biases, or for a module whose rule is for another function"
        )


def lowered(head: nn.Module, x: Tensor, clean: Clean) -> Clean:
    """Return the answers with margins that are never above those of the exact head at x.

    Each margin is lowered by the rounding error of its two logits and of their difference. Proof: docs/proofs.md#slack.
    """
    logits_BJ = head(x)
    same_function(logits_BJ, clean)
    error_BJ = float_error.RESERVE * float_error.defect(head, x, logits_BJ)
    margin_BJ = margins_of(logits_BJ, clean.label_B)
    off_BJ = error_BJ + error_BJ.gather(1, clean.label_B[:, None]) + U * margin_BJ.abs()
    return replace(clean, margin_BJ=(margin_BJ - off_BJ).masked_fill(_own(clean), torch.inf))


def guess_of(analysis: Analysis) -> Tensor:
    """Return the analysis's own guess where that is a radius, else a fixed one: a search from 0 would end at once."""
    usual_B = analysis.ball.eps_within(torch.full_like(analysis.clean.margin_BJ[:, 0], FIRST_RADIUS))
    if not isinstance(analysis, Searched):
        return usual_B
    guess_B = analysis.guess()
    return torch.where((guess_B > 0) & guess_B.isfinite(), guess_B, usual_B)


def in_search(analysis: Analysis, eps: float | Tensor) -> Certificate:
    """Return the certificate for one of the many eps of a search."""
    return analysis.in_search(eps) if isinstance(analysis, Searched) else analysis.at(eps)


def pair_weights(head: nn.Linear, labels_B: Tensor) -> Tensor:
    """Return ||w_y - w_j|| of the label and every class: (B, J). Proof: docs/proofs.md#pairwise-margin."""
    return torch.linalg.vector_norm(head.weight[labels_B][:, None] - head.weight, dim=-1)


def per_image(eps: float | Tensor, clean: Clean) -> Tensor:
    """Return eps as (B,) in float64, after checking that the model has not changed since the analysis."""
    clean.require_unchanged()
    return torch.as_tensor(eps, dtype=torch.float64, device=clean.margin_BJ.device).expand(len(clean.label_B))


def decide(clean: Clean, loss_BJ: Tensor, eps_B: Tensor) -> Certificate:
    """Certify the images whose label keeps its margin over every class, slack included.

    A loss that is NaN counts as infinite. Proof: docs/proofs.md#slack.
    """
    loss_BJ = nan_to_inf(loss_BJ)
    return decide_by(clean, loss_BJ, eps_B, binding_class(clean, loss_BJ))


def decide_by(clean: Clean, loss_BJ: Tensor, eps_B: Tensor, class_B: Tensor) -> Certificate:
    """Decide as `decide` does, and report the margin and loss of the given class of each image."""
    open_BJ = ~(gaps(clean.margin_BJ, loss_BJ) > 0) & ~_own(clean)
    margin_B, loss_B = of_class(clean.margin_BJ, class_B), of_class(loss_BJ, class_B)
    return Certificate(
        eps_B=eps_B,
        margin_B=margin_B,
        loss_B=loss_B,
        correct_B=clean.correct_B,
        certified_B=clean.correct_B & ~open_BJ.any(-1),
        unknown_B=clean.correct_B & ~(torch.isfinite(loss_B) & (margin_B > 0)),
    )


def of_images(chosen_B: Tensor, one: Certificate, other: Certificate) -> Certificate:
    """Return the answers of `one` for the chosen images, and of `other` for the rest."""
    parts = {f.name: torch.where(chosen_B, getattr(one, f.name), getattr(other, f.name)) for f in fields(Certificate)}
    return Certificate(**parts)


def of_class(values_BJ: Tensor, class_B: Tensor) -> Tensor:
    """Select the value of one class per image: (B, J) -> (B,)."""
    return values_BJ.gather(1, class_B[:, None]).squeeze(1)


def binding_class(clean: Clean, loss_BJ: Tensor) -> Tensor:
    """Return the class that comes closest to taking over from the label: (B,)."""
    return gaps(clean.margin_BJ, loss_BJ).masked_fill(_own(clean), torch.inf).argmin(-1)


def _own(clean: Clean) -> Tensor:
    return torch.zeros_like(clean.margin_BJ, dtype=torch.bool).scatter_(1, clean.label_B[:, None], True)


def gaps(margin: Tensor, loss: Tensor) -> Tensor:
    """Return what is left of margins after losses and slack; NaN where both are infinite."""
    return margin - loss - SLACK * (1 + margin.abs() + loss)


def open_pairs(clean: Clean, loss_BJ: Tensor) -> Tensor:
    """Return the margins that may be lost, (B, J); never the label's own."""
    return ~(gaps(clean.margin_BJ, loss_BJ) > 0) & torch.isfinite(clean.margin_BJ)
