"""A projected gradient attack as a checked value: the content of `configs/attack/*.yaml`."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from certizoo import UserError
from certizoo.attacks.attack import Draws
from certizoo.attacks.attention import LOSS_NAMES
from certizoo.attacks.loop import Disturb, pgd
from certizoo.attacks.norms import NORMS


@dataclass(frozen=True)
class AttackConfig:
    """Projected gradient ascent; steps=1 with step_size=eps and random_start=False is FGSM.

    Attributes: as in `attacks.pgd`; `eps` and `step_size` in [0,1] pixel units.

    Raises:
        UserError: naming the key with a wrong value.
    """

    together: ClassVar[bool] = False
    norm: str = "linf"
    eps: float = 4 / 255
    steps: int = 10
    step_size: float | None = None
    random_start: bool = True
    restarts: int = 1
    loss: str = "ce"
    stop_when_fooled: bool = False  # without keep_worst, as in training, it has no effect

    def __post_init__(self) -> None:
        steps, restarts, step_size = self.steps, self.restarts, self.step_size
        several = _at_least(restarts, 2) and self.random_start
        faults = {
            "norm": self.norm not in NORMS and f"one of {', '.join(NORMS)}",
            "loss": self.loss not in LOSS_NAMES and f"one of {', '.join(LOSS_NAMES)}",
            "eps": not _at_least(self.eps, 0) and "a number >= 0 in [0,1] pixel units",
            "steps": not _at_least(steps, 1) and "at least 1",
            "step_size": step_size is not None
            and not (_at_least(step_size, 0) and step_size > 0)
            and "above 0, or null for 2.5 eps/steps",
            "restarts": not (restarts == 1 or several) and "at least 1, and 1 without attack.random_start",
        }
        for key, mend in faults.items():
            if mend:
                raise UserError(f"attack.{key}={getattr(self, key)} does not work; set it to {mend}")

    def run(
        self,
        model: nn.Module,
        images_BCHW: Tensor,
        labels_B: Tensor,
        draws: Draws = None,
        keep_worst: bool = True,
        disturb: Disturb | None = None,
    ) -> Tensor:
        """Return adversarial_BCHW of `attacks.pgd`."""
        return pgd(
            model, images_BCHW, labels_B, norm=self.norm, eps=self.eps, steps=self.steps, step_size=self.step_size,
            random_start=self.random_start, restarts=self.restarts, loss=self.loss, generator=draws,
            keep_worst=keep_worst, stop_when_fooled=self.stop_when_fooled and keep_worst, disturb=disturb,
        )  # fmt: skip

    def within(self, share: float) -> "AttackConfig":
        """Return the attack in a ball of this share of the radius, with steps scaled alike."""
        size = self.step_size * share if self.step_size and share else None
        return replace(self, eps=self.eps * share, step_size=size)

    def stronger(self, steps: int) -> "AttackConfig":
        """Return the attack with at least this many steps of default size, to test a model trained on few steps."""
        return self if self.steps >= steps else replace(self, steps=steps, step_size=None, random_start=True)


def _at_least(value: object, least: float) -> bool:
    """Return False for text too, such as 8/255 on a command line."""
    return isinstance(value, int | float) and value >= least
