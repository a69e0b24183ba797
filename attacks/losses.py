"""What an attack climbs, one number an image: higher is worse for the model. Legend: logits_BK, labels_B.

`margin` exists because the gradient of cross-entropy vanishes where the model is sure of itself, and penalties on
weights that shrink or blow up logits make that look like robustness.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def ce(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """-log softmax(z)_y. With probabilities p (B, K) for labels -sum_k p_k log softmax(z)_k, up to a constant
    KL(p || softmax(z)): what the attack of TRADES climbs."""
    return F.cross_entropy(logits_BK, labels_B, reduction="none")


def margin(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """max_{j != y} z_j - z_y, positive exactly where the image is misclassified."""
    true_B = logits_BK.gather(1, labels_B[:, None]).squeeze(1)
    others_BK = logits_BK.scatter(1, labels_B[:, None], -torch.inf)
    return others_BK.amax(dim=1) - true_B


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"ce": ce, "margin": margin}
