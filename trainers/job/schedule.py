"""Learning rate and momentum as pure functions of the step: no state to save or resume."""

import math
from dataclasses import dataclass
from typing import Annotated

from certizoo.config.schema import Gt, Le, NonNegative, OneOf, Section, Share
from trainers.settings import BelowOne, InsideOne

FIRST, LAST = 1 / 25, 1 / 25e4  # of the peak: first and last learning rate of one cycle
WARMUP_EPOCHS, WARMUP = 5, 1 / 20


@dataclass(frozen=True)
class ScheduleConfig(Section):
    """configs/schedule: the factor of the learning rate at step t.

    warm-up   lr * (t + 1) / W                       t < W = warmup_epochs * steps an epoch; null: the same for
                                                     WARMUP_EPOCHS, but at most the share WARMUP of all steps
    cosine    lr * (r + (1 - r) * (1 + cos(pi (t - W) / (T - W))) / 2)   r = min_lr_ratio, T steps in all
    step      lr * gamma^(number of milestones, in epochs, passed at t)
    onecycle  lr rises from lr/25 to lr in the share `peak` of the steps, then falls to lr/25e4, by half cosines;
              meanwhile the momentum (first beta of AdamW) goes from the second of `momenta` to the first and back
              (Smith and Topin 2018, https://arxiv.org/abs/1708.07120; the values of torch's OneCycleLR)
    """

    name: Annotated[str, OneOf("cosine", "step", "onecycle")]
    warmup_epochs: NonNegative | None = 0.0
    min_lr_ratio: Share = 0.0
    milestones: list[NonNegative] | None = None
    gamma: Annotated[float, Gt(0), Le(1)] = 0.1
    peak: InsideOne = 0.3
    momenta: tuple[BelowOne, BelowOne] = (0.85, 0.95)

    def factor(self, step: int, total_steps: int, steps_per_epoch: int) -> float:
        """Return lr(step) / lr for step = 0 .. total_steps - 1."""
        if self.name == "onecycle":
            return self._cycled((FIRST, 1.0, LAST), step, total_steps)
        warmup = self.warmup(total_steps, steps_per_epoch)
        if step < warmup:
            return (step + 1) / warmup
        if self.name == "step":
            return self.gamma ** sum(step >= epoch * steps_per_epoch for epoch in self.milestones or [])
        progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2

    def warmup(self, total_steps: int, steps_per_epoch: int) -> int:
        """Return W, the steps of the warm-up."""
        if self.warmup_epochs is None:
            return round(min(WARMUP_EPOCHS * steps_per_epoch, WARMUP * total_steps))
        return round(self.warmup_epochs * steps_per_epoch)

    def momentum(self, step: int, total_steps: int) -> float | None:
        """Return the momentum; None keeps the optimiser's own."""
        low, high = self.momenta
        return self._cycled((high, low, high), step, total_steps) if self.name == "onecycle" else None

    def _cycled(self, values: tuple[float, float, float], step: int, total_steps: int) -> float:
        """Interpolate from the first value to the second, reached at the peak, and on to the last."""
        turn, end = max(self.peak * total_steps - 1, 0.0), max(total_steps - 1, 1)
        rising = step <= turn
        (start, goal), begin, length = (values[:2], 0.0, turn) if rising else (values[1:], turn, end - turn)
        done = min((step - begin) / length, 1.0) if length else 1.0
        return goal + (start - goal) * (1 + math.cos(math.pi * done)) / 2
