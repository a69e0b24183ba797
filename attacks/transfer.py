"""A transfer attack: images made to fool one model, judged on another.

    x' = attack(source, x, y)          whatever the target is: it is not looked at

A target that is fooled by the images of an undefended source more often than by its own gradients hides them. The
survivors of a transfer attack say nothing by themselves.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from attacks.attack import Attack, Draws


@dataclass(frozen=True, eq=False)
class Transfer:
    """`attack` against `source`, which stands on the images' device and knows the same classes."""

    source: nn.Module
    attack: Attack

    @property
    def norm(self) -> str:
        """The attack's."""
        return self.attack.norm

    @property
    def eps(self) -> float | None:
        """The attack's."""
        return self.attack.eps

    @property
    def together(self) -> bool:
        """The attack's."""
        return self.attack.together

    def run(self, model: nn.Module, images_BCHW: Tensor, labels_B: Tensor, draws: Draws = None) -> Tensor:
        """adversarial_BCHW against the source; `model`, the target, is left alone."""
        return self.attack.run(self.source, images_BCHW, labels_B, draws)
