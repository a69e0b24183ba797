"""What every attack is: a value that perturbs images inside its threat model, whoever wrote the search behind it.

    run : (model, images in [0,1], labels) -> images in [0,1], and within eps of them where the attack has an eps

Legend: B batch, C channels, H W pixels.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Generator, Tensor, nn

Draws = Generator | Sequence[Generator] | None
"""One generator for the batch, or one an image: then no image's random numbers depend on its neighbours."""


class Attack(Protocol):
    """A search for images that fool a model. It never looks for a certificate's sake: what it returns is a fact."""

    @property
    def norm(self) -> str:
        """'linf' or 'l2' over the whole image; 'none' where distance is not measured (corruptions)."""

    @property
    def eps(self) -> float | None:
        """Radius of the ball in [0,1] pixel units; None: the nearest image that fools, at any distance."""

    @property
    def together(self) -> bool:
        """True: draws for all images of a call at once, so that the outcome belongs to the batch. False: with a
        generator an image, the outcome of an image is the same in every batch, up to the model's rounding."""

    def run(self, model: nn.Module, images_BCHW: Tensor, labels_B: Tensor, draws: Draws = None) -> Tensor:
        """adversarial_BCHW in [0,1], of the images' dtype, within eps. The model is afterwards as it was."""
