"""The sequence of largest radii for which the maps of an image are built: its radius stages.

See certify/image/radius_stage.py. A stage proves all of its largest e, or stops far short of it because its maps
diverge there. The largest e is searched between the two: up from a radius that is proved, by whichever method, and down
from one that is not, until the next one promises no more than `Budget.gain`. The choice is made image by image and does
not affect soundness.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

UP = 1.12  # largest factor between successive e while no stage fell short
DOWN = 0.7  # smallest factor where one did
STEPS = 4  # stages skipped at a time because the adjoint analysis proves them


@dataclass(frozen=True)
class RadiusSchedule:
    """The state of the search for all images, (B,) each.

    `most_B` is the largest e of the next stage, NaN where there is none; `proved_B` the proved radius; `short_B` the
    smallest e that a stage failed to prove; `limit_B` the e at which the first order alone uses up a margin, the
    initial value of `short_B`.
    """

    most_B: Tensor
    proved_B: Tensor
    short_B: Tensor
    limit_B: Tensor

    @staticmethod
    def first(most_B: Tensor, limit_B: Tensor) -> "RadiusSchedule":
        return RadiusSchedule(most_B, torch.zeros_like(most_B), limit_B, limit_B)

    def may_decide(self, e_B: Tensor) -> Tensor:
        """Return whether this stage, or a later one above it, may decide e."""
        return e_B < torch.maximum(self.most_B, self.short_B)  # NaN, hence False, where there is no stage

    def after(self, reach_B: Tensor) -> "RadiusSchedule":
        """Return the schedule after a stage at the current largest e that proved `reach_B`."""
        full_B = reach_B >= self.most_B
        proved_B = torch.maximum(self.proved_B, reach_B)
        short_B = torch.where(full_B, self.short_B, torch.minimum(self.short_B, self.most_B))
        between_B = (proved_B * short_B).sqrt()
        up_B = torch.where(short_B < self.limit_B, between_B, torch.minimum(between_B, UP * self.most_B))
        most_B = torch.where(full_B, up_B, torch.maximum(between_B, DOWN * short_B))
        return RadiusSchedule(most_B, proved_B, short_B, self.limit_B)

    def where(self, chosen_B: Tensor, other: "RadiusSchedule") -> "RadiusSchedule":
        """Return this schedule for the chosen images, the other one for the rest."""
        mine, its = (vars(one).values() for one in (self, other))
        return RadiusSchedule(*(torch.where(chosen_B, a_B, b_B) for a_B, b_B in zip(mine, its, strict=True)))

    def worth(self, gain: float) -> "RadiusSchedule":
        """Return the schedule with NaN where it promises at most `gain` times the proved radius."""
        return replace(self, most_B=torch.where(self.most_B > gain * self.proved_B, self.most_B, torch.nan))

    def skip_proved(self, proved: Callable[[Tensor], Tensor], gain: float) -> "RadiusSchedule":
        """Skip stages whose largest e the adjoint analysis proves; `proved` maps e (B,) to (B,)."""
        schedule = self.worth(gain)
        for _ in range(STEPS):
            proved_B = proved(schedule.most_B.nan_to_num(0.0)) & ~schedule.most_B.isnan()
            if not bool(proved_B.any()):
                break
            schedule = schedule.where(~proved_B, schedule.after(schedule.most_B)).worth(gain)
        return schedule
