"""What an objective may do with the model. Legend: images_BCHW in [0,1], logits_BK, labels_B."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Terms = dict[str, Tensor]


@dataclass(frozen=True)
class Probe:
    """The two ways through the model in a training step, and the loss of both.

    Attributes:
        forward: images_BCHW -> logits_BK in train mode, recorded for the optimiser; call it once.
        attack: (images_BCHW, labels_B) -> adversarial_BCHW; leaves no trace on the model.
    """

    forward: Callable[[Tensor], Tensor]
    attack: Callable[[Tensor, Tensor], Tensor]
    label_smoothing: float = 0.0

    def cross_entropy(self, logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        """Mean over the batch, in float32 whatever the model computes in."""
        return F.cross_entropy(logits_BK.float(), labels_B, label_smoothing=self.label_smoothing)


Objective = Callable[[Probe, Tensor, Tensor], Terms]


def accuracy(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """The share of the batch that is right, without gradient."""
    with torch.no_grad():
        return (logits_BK.argmax(dim=1) == labels_B).float().mean()
