"""Losses that an attack maximises, one number per image: higher is worse for the model. Legend: logits_BK, labels_B.

The gradient of cross-entropy vanishes if the model is confident, and penalties on weights that shrink or enlarge logits
make that look like robustness; `margin` avoids this. `dlr` is the margin in units of the spread of the logits.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from certizoo import UserError
from certizoo.inputs import extremes, require_classes


def ce(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Return -log softmax(z)_y.

    With probabilities p (B, K) as labels, return -sum_k p_k log softmax(z)_k, which is KL(p || softmax(z)) up to a
    constant: the attack of TRADES maximises it.
    """
    return F.cross_entropy(logits_BK, labels_B, reduction="none")


def margin(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Return max_{j != y} z_j - z_y, positive exactly if the image is misclassified."""
    true_B = logits_BK.gather(1, labels_B[:, None]).squeeze(1)
    others_BK = logits_BK.scatter(1, labels_B[:, None], -torch.inf)
    return others_BK.amax(dim=1) - true_B


def dlr(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Return (max_{j != y} z_j - z_y) / (z_(1) - z_(3)), invariant to the scale of the logits.

    z_(1) >= z_(2) >= ... are the sorted logits.

    The difference of logits ratio of Croce & Hein, https://arxiv.org/abs/2003.01690; positive if the image is
    misclassified. Raises UserError below three classes, where z_(3) does not exist.
    """
    require_three(logits_BK.shape[1])
    top_B3 = logits_BK.topk(3, dim=1).values
    return margin(logits_BK, labels_B) / (top_B3[:, 0] - top_B3[:, 2] + 1e-12)


def require_three(classes: int) -> None:
    """Raise UserError for a model without a third class, which `dlr` needs."""
    if classes < 3:
        raise UserError(f"attack.loss=dlr needs three classes or more, but the model has {classes}; use margin")


def refusing(loss: Callable[[Tensor, Tensor], Tensor], labels_B: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of some of these labels, which raises UserError at logits without their classes."""
    least, largest = extremes(labels_B)

    def checked(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        require_classes(least, largest, logits_BK.shape[1])
        return loss(logits_BK, labels_B)

    return checked


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"ce": ce, "margin": margin, "dlr": dlr}
