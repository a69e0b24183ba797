"""A transfer attack: images made to fool one model, judged on another.

    x' = attack(source, x, y)          the target is not used

If the images of an undefended source fool the target more often than the target's own gradients, the target hides its
gradients. Surviving a transfer attack proves nothing by itself.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from certizoo.attacks.attack import Attack, Draws


@dataclass(frozen=True, eq=False)
class Transfer:
    """`attack` against `source`, which is on the images' device and has the same classes."""

    source: nn.Module
    attack: Attack

    @property
    def norm(self) -> str:
        """The attack's norm."""
        return self.attack.norm

    @property
    def eps(self) -> float | None:
        """The attack's eps."""
        return self.attack.eps

    @property
    def together(self) -> bool:
        """The attack's `together`."""
        return self.attack.together

    def require_model(self, model: nn.Module, classes: int, side: int) -> None:
        """Check the source by the attack's own requirements."""
        self.attack.require_model(self.source, classes, side)

    def run(self, model: nn.Module, images_BCHW: Tensor, labels_B: Tensor, draws: Draws = None) -> Tensor:
        """Return adversarial_BCHW against the source; `model`, the target, is not used."""
        return self.attack.run(self.source, images_BCHW, labels_B, draws)
