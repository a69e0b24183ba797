"""The sequence of largest radii for which the maps of an image are built: its radius stages.

See certify/image/radius_stage.py. The maps of a stage hold up to its largest e, and the larger that is, the less they
prove. So the best stage has a largest e that it just proves. A stage says how far its bounds would reach; the next
largest e lies between both, and is used if it promises more than `Budget.gain` times what is proved. The choice is made
image by image and does not affect soundness.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

UP = 1.12  # factor between successive e where the adjoint analysis proves the smaller one
FORTH = 0.75  # position of the next e between the largest e of a stage and its reach beyond it, in the logarithm
BACK = 0.6  # the same for a reach below it
SURE = 1.1  # in units of a reach beyond the largest e: no stage is expected to prove more
DOWN = 0.7  # smallest factor where a stage fell short
STEPS = 4  # stages skipped at a time because the adjoint analysis proves them


@dataclass(frozen=True)
class RadiusSchedule:
    """The state of the search for all images, (B,) each.

    `most_B` is the largest e of the next stage, NaN where there is none; `proved_B` the proved radius; `short_B` the
    smallest e that no stage is expected to prove.
    """

    most_B: Tensor
    proved_B: Tensor
    short_B: Tensor

    @staticmethod
    def first(most_B: Tensor, limit_B: Tensor) -> "RadiusSchedule":
        """Return the schedule before any stage; at `limit_B` the first order alone uses up a margin."""
        return RadiusSchedule(most_B, torch.zeros_like(most_B), limit_B)

    def may_decide(self, e_B: Tensor) -> Tensor:
        """Return whether this stage, or a later one above it, may decide e."""
        return e_B < torch.maximum(self.most_B, self.short_B)  # NaN, hence False, where there is no stage

    def after(self, reach_B: Tensor) -> "RadiusSchedule":
        """Return the schedule after a stage at the current largest e with this reach, which may lie beyond it."""
        full_B = reach_B >= self.most_B
        proved_B = torch.maximum(self.proved_B, torch.minimum(reach_B, self.most_B))
        short_B = torch.minimum(self.short_B, torch.where(full_B, SURE * reach_B, self.most_B))
        up_B = torch.minimum(_between(self.most_B, reach_B, FORTH), (proved_B * self.short_B).sqrt())
        down_B = torch.maximum(_between(self.most_B, proved_B, BACK), DOWN * self.most_B)
        return RadiusSchedule(torch.where(full_B, up_B, down_B), proved_B, short_B)

    def up(self) -> "RadiusSchedule":
        """Return the schedule where something else proves the current largest e."""
        proved_B = torch.maximum(self.proved_B, self.most_B)
        most_B = torch.minimum(UP * self.most_B, (proved_B * self.short_B).sqrt())
        return RadiusSchedule(most_B, proved_B, self.short_B)

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
            schedule = schedule.where(~proved_B, schedule.up()).worth(gain)
        return schedule


def _between(one_B: Tensor, other_B: Tensor, share: float) -> Tensor:
    """Return the number at this share of the way from one to the other, in the logarithm."""
    return one_B ** (1 - share) * other_B**share
