"""Which largest e maps of an image are made for, one after the other: its rungs (certify/methods/radius_stage.py).

A rung proves all of its largest e, or stops far short of it, as its maps diverge there. So the largest e is schedule
between the two: up from one that is proved, whoever proves it, down from one that is not, until the next one promises
no more than `Budget.gain`. The choice is each image's own, and no matter of soundness.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

UP = 1.12  # the next largest e at most, in units of this one, while none fell short
DOWN = 0.7  # and at least, where it did
STEPS = 4  # past what the adjoint analysis proves


@dataclass(frozen=True)
class RadiusSchedule:
    """Of all images: the largest e of the next stage, not a number where there is none; what is proved; the least that a
    rung fell short of; and where the first order alone takes a margin, which counts as that."""

    most_B: Tensor
    proved_B: Tensor
    short_B: Tensor
    limit_B: Tensor

    @staticmethod
    def first(most_B: Tensor, limit_B: Tensor) -> "RadiusSchedule":
        return RadiusSchedule(most_B, torch.zeros_like(most_B), limit_B, limit_B)

    def may_decide(self, e_B: Tensor) -> Tensor:
        """This stage, or one above it."""
        return e_B < torch.maximum(self.most_B, self.short_B)  # which is not a number where there is no rung

    def after(self, reach_B: Tensor) -> "RadiusSchedule":
        """When of the largest e so much was proved."""
        full_B = reach_B >= self.most_B
        proved_B = torch.maximum(self.proved_B, reach_B)
        short_B = torch.where(full_B, self.short_B, torch.minimum(self.short_B, self.most_B))
        between_B = (proved_B * short_B).sqrt()
        up_B = torch.where(short_B < self.limit_B, between_B, torch.minimum(between_B, UP * self.most_B))
        most_B = torch.where(full_B, up_B, torch.maximum(between_B, DOWN * short_B))
        return RadiusSchedule(most_B, proved_B, short_B, self.limit_B)

    def where(self, chosen_B: Tensor, other: "RadiusSchedule") -> "RadiusSchedule":
        """This for some images, the other for the rest."""
        mine, its = (vars(one).values() for one in (self, other))
        return RadiusSchedule(*(torch.where(chosen_B, a_B, b_B) for a_B, b_B in zip(mine, its, strict=True)))

    def worth(self, gain: float) -> "RadiusSchedule":
        """Where it promises more than that; nothing, and what is not a number, promise nothing."""
        return replace(self, most_B=torch.where(self.most_B > gain * self.proved_B, self.most_B, torch.nan))

    def skip_proved(self, proved: Callable[[Tensor], Tensor], gain: float) -> "RadiusSchedule":
        """Past what the adjoint analysis proves: e (B,) -> (B,)."""
        schedule = self.worth(gain)
        for _ in range(STEPS):
            proved_B = proved(schedule.most_B.nan_to_num(0.0)) & ~schedule.most_B.isnan()
            if not bool(proved_B.any()):
                break
            schedule = schedule.where(~proved_B, schedule.after(schedule.most_B)).worth(gain)
        return schedule
