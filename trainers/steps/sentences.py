"""Sentences in a training step: the objective sees embedded words, and the attack moves them.

    x = sigmoid(E[numbers]);     adversarial: x + [x' - x], x' of the attack on [x], so that E learns too

[.] means without gradient. Sentences of a batch are padded; padding gets no attention and is not moved.

Legend: numbers_BN of words, kept_BN False for padding, x_BCNT embedded.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from trainers.objectives import Probe
from zoo.models.sentences import PADDING, Padded, embed_of


def embedded(probe: Probe, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Probe, tuple[Tensor, Tensor]]:
    """Return the probe and the batch that an objective gets: of images, both unchanged.

    Args:
        probe: of the step; its attack also takes `kept_BN`.
        model: the bare model, whose words the batch numbers.
        batch: images or numbers, and labels.
    """
    attack: Callable[..., Tensor] = probe.attack
    numbers_BN, labels_B = batch
    if (embed := embed_of(model)) is None:
        return probe, batch
    kept_BN = numbers_BN != PADDING

    def through(measure: Any, *inputs: Any) -> Any:
        return probe.through(lambda model, *given: measure(Padded(model, kept_BN), *given), *inputs)

    def attacked(x_BCNT: Tensor, labels_B: Tensor) -> Tensor:
        found_BCNT = attack(x_BCNT.detach(), labels_B, kept_BN)
        return x_BCNT + (found_BCNT - x_BCNT).detach()

    return replace(probe, through=through, attack=attacked), (embed.embed(numbers_BN), labels_B)
