"""The operations that an objective may use. Legend: images_BCHW in [0,1], logits_BK, labels_B.

With mixup or CutMix labels are probabilities labels_BK; objectives in `SOFT_LABELS` accept both.
"""

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
    """The passes through the model in a training step, the common loss, and the objective's settings.

    Attributes:
        through: (measure, *inputs) -> measure(model, *inputs) in train mode, recorded for the optimiser; call it once.
        attack: (images_BCHW, labels_B or probabilities_BK) -> adversarial_BCHW; leaves the model unchanged.
        predict: images_BCHW -> logits_BK in eval mode, not recorded; leaves the model unchanged.
        progress: the share of the training that is done, in [0, 1).
        taught: (cross-entropy, logits_BK) -> that with a teacher's soft targets (trainers/techniques/distill.py).
    """

    through: Callable[..., Any]
    attack: Callable[[Tensor, Tensor], Tensor]
    predict: Callable[[Tensor], Tensor]
    settings: ObjectiveConfig
    progress: float = 0.0
    label_smoothing: float = 0.0
    taught: Callable[[Tensor, Tensor], Tensor] = lambda loss, logits_BK: loss

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Run the plain pass, images_BCHW -> logits_BK."""
        logits_BK: Tensor = self.through(nn.Module.__call__, images_BCHW)
        return logits_BK

    def cross_entropy(self, logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        """Return the mean over the batch, in float32 or better whatever the model computes in."""
        logits_BK = wide(logits_BK)
        return self.taught(F.cross_entropy(logits_BK, labels_B, label_smoothing=self.label_smoothing), logits_BK)

    @property
    def eps(self) -> float:
        """Return objective.eps times min(1, t / ramp), t the share of the training that is done."""
        ramp = self.settings.ramp
        return self.settings.eps * (min(1.0, self.progress / ramp) if ramp else 1.0)


Objective = Callable[[Probe, Tensor, Tensor], Terms]


def wide(logits_BK: Tensor) -> Tensor:
    """Return the logits in float32, or unchanged in float64."""
    return logits_BK.to(torch.promote_types(logits_BK.dtype, torch.float32))


def accuracy(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Return the share of the batch that is correct, without gradient; for mixed labels the largest counts."""
    with torch.no_grad():
        classes_B = labels_B if labels_B.ndim == 1 else labels_B.argmax(dim=1)
        return (logits_BK.argmax(dim=1) == classes_B).float().mean()
