"""What an objective may do with the model. Legend: images_BCHW in [0,1], logits_BK, labels_B."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainers.settings import ObjectiveConfig

Terms = dict[str, Tensor]


@dataclass(frozen=True)
class Probe:
    """The two ways through the model in a training step, the loss of both, and what the objective is set to.

    Attributes:
        through: (measure, *inputs) -> measure(model, *inputs) in train mode, recorded for the optimiser; call it once.
        attack: (images_BCHW, labels_B) -> adversarial_BCHW; leaves no trace on the model.
        progress: the share of the training that is done, in [0, 1).
    """

    through: Callable[..., Any]
    attack: Callable[[Tensor, Tensor], Tensor]
    settings: ObjectiveConfig
    progress: float = 0.0
    label_smoothing: float = 0.0

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """The plain pass, images_BCHW -> logits_BK."""
        logits_BK: Tensor = self.through(nn.Module.__call__, images_BCHW)
        return logits_BK

    def cross_entropy(self, logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        """Mean over the batch, in float32 whatever the model computes in."""
        return F.cross_entropy(logits_BK.float(), labels_B, label_smoothing=self.label_smoothing)


Objective = Callable[[Probe, Tensor, Tensor], Terms]


def accuracy(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """The share of the batch that is right, without gradient."""
    with torch.no_grad():
        return (logits_BK.argmax(dim=1) == labels_B).float().mean()
