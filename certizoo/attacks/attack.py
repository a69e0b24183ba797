"""The interface of every attack: a value that perturbs images within its threat model.

    run : (model, images in [0,1], labels) -> images in [0,1], and within eps of them if the attack has an eps

Legend: B batch, C channels, H W pixels.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Generator, Tensor, nn

Draws = Generator | Sequence[Generator] | None
"""One generator for the batch, or one per image: then an image's random numbers do not depend on its neighbours."""


class Attack(Protocol):
    """A search for images that fool a model. An image it finds refutes any certificate that says otherwise."""

    @property
    def norm(self) -> str:
        """The norm: 'linf' or 'l2' over the whole image; 'none' if distance is not measured (corruptions)."""

    @property
    def eps(self) -> float | None:
        """The radius of the ball in [0,1] pixel units; None searches the nearest image that fools, at any distance."""

    @property
    def together(self) -> bool:
        """True if one draw serves all images of a call.

        If True, the outcome belongs to the batch. If False, with one generator per image, an image's outcome is the
        same in every batch, up to the model's rounding.
        """

    def require_model(self, model: nn.Module, classes: int, side: int) -> None:
        """Raise UserError if the attack cannot work on this model of square images."""

    def run(self, model: nn.Module, images_BCHW: Tensor, labels_B: Tensor, draws: Draws = None) -> Tensor:
        """Return adversarial_BCHW in [0,1], of the images' dtype, within eps. The model is left unchanged."""
