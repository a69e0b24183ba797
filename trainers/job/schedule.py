"""The learning rate as a pure function of the step: nothing to save, nothing that resume could get wrong."""

import math
from dataclasses import dataclass

from trainers.settings import require


@dataclass(frozen=True)
class ScheduleConfig:
    """configs/schedule.

    warm-up   lr * (t + 1) / W                                        t < W = warmup_epochs * steps an epoch
    cosine    lr * (r + (1 - r) * (1 + cos(pi (t - W) / (T - W))) / 2)   r = min_lr_ratio, T steps in all
    step      lr * gamma^(number of milestones, in epochs, passed at t)
    """

    name: str
    warmup_epochs: float = 0.0
    min_lr_ratio: float = 0.0
    milestones: list[float] | None = None
    gamma: float = 0.1

    def __post_init__(self) -> None:
        require(self.name in ("cosine", "step"), f"schedule.name={self.name} does not exist; use cosine or step")
        require(self.warmup_epochs >= 0, f"schedule.warmup_epochs={self.warmup_epochs} does not work; use 0 or more")

    def factor(self, step: int, total_steps: int, steps_per_epoch: int) -> float:
        """lr(step) / lr for step = 0 .. total_steps - 1."""
        warmup = round(self.warmup_epochs * steps_per_epoch)
        if step < warmup:
            return (step + 1) / warmup
        if self.name == "step":
            return self.gamma ** sum(step >= epoch * steps_per_epoch for epoch in self.milestones or [])
        progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
