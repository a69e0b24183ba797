"""Minimal-norm attacks: the nearest image that fools, at any distance. The only module that imports foolbox.

    CW        min_w ||x' - x||_2^2 + c max(0, z_y - max_{j != y} z_j + kappa),  x' = (tanh(w) + 1)/2, by Adam;
              the nearest of the points that fooled is kept
    DeepFool  x' <- x' + the step to the nearest boundary of the model linearised at x', until it fools

Carlini & Wagner, https://arxiv.org/abs/1608.04644; Moosavi-Dezfooli et al., https://arxiv.org/abs/1511.04599.

Neither is random, and no image depends on its neighbours: an image's result is the same in every batch, up to the
model's rounding. Images that are misclassified already, or that nothing fooled, are returned unchanged.

Legend: B batch, R those of its images that were correct, C channels, H W pixels.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from certizoo import UserError
from certizoo.attacks.attack import Draws
from certizoo.attacks.guard import Forward, boxed, classes_of, fooled
from certizoo.attacks.loop import probing
from certizoo.attacks.norms import distance
from certizoo.config.schema import Count, Ge, NonNegative, Positive, Section
from certizoo.inputs import labels_given


@dataclass(frozen=True)
class CarliniWagner(Section):
    """Carlini & Wagner in L2. The defaults are those of CoViT, section 5.3: c = 1 without a search, kappa = 0.

    Attributes:
        threshold: an image that fools from beyond this L2 distance in [0,1] pixel units does not count; None allows any
            distance.
    """

    norm: ClassVar[str] = "l2"
    eps: ClassVar[float | None] = None
    together: ClassVar[bool] = False
    c: Positive = 1.0
    confidence: NonNegative = 0.0
    lr: Positive = 0.01
    steps: Count = 100
    binary_search_steps: Count = 1
    threshold: Positive | None = None

    def require_model(self, model: nn.Module, classes: int, side: int) -> None:
        """Raise UserError if foolbox is missing."""
        _foolbox()

    def run(self, model: nn.Module, images_BCHW: Tensor, labels_B: Tensor, draws: Draws = None) -> Tensor:
        """Return adversarial_BCHW; `draws` is unused: nothing is drawn."""
        from_foolbox = _foolbox().L2CarliniWagnerAttack(
            initial_const=self.c, confidence=self.confidence, stepsize=self.lr, steps=self.steps,
            binary_search_steps=self.binary_search_steps,
            abort_early=False,  # it would look at the sum over the batch
        )  # fmt: skip
        return _nearest(from_foolbox, model, images_BCHW, labels_B, self.threshold)


@dataclass(frozen=True)
class DeepFool(Section):
    """DeepFool in L2: it tries the boundaries of the `candidates` likeliest classes and goes `overshoot` beyond."""

    norm: ClassVar[str] = "l2"
    eps: ClassVar[float | None] = None
    together: ClassVar[bool] = False
    steps: Count = 50
    candidates: Annotated[int, Ge(2)] = 10
    overshoot: NonNegative = 0.02

    def require_model(self, model: nn.Module, classes: int, side: int) -> None:
        """Raise UserError if foolbox is missing."""
        _foolbox()

    def run(self, model: nn.Module, images_BCHW: Tensor, labels_B: Tensor, draws: Draws = None) -> Tensor:
        """Return adversarial_BCHW; `draws` is unused: nothing is drawn."""
        from_foolbox = _foolbox().L2DeepFoolAttack(
            steps=self.steps, candidates=self.candidates, overshoot=self.overshoot
        )
        return _nearest(from_foolbox, model, images_BCHW, labels_B, None)


def _foolbox() -> Any:
    try:
        import foolbox.attacks
    except ImportError as error:  # also raised without a git program
        raise UserError(f"foolbox does not load ({error}); pip install foolbox, and git") from None
    return foolbox.attacks


def _nearest(
    from_foolbox: Any, model: nn.Module, images_BCHW: Tensor, labels_B: Tensor, threshold: float | None
) -> Tensor:
    """Return foolbox's result for the images that are correct, if it fools within the threshold."""
    from foolbox import PyTorchModel

    labels_B = labels_given(images_BCHW, labels_B)
    forward, adversarial_BCHW = Forward(model), images_BCHW.detach().clone()
    if not len(labels_B):
        return adversarial_BCHW
    with probing(model), _root_logger():
        classes_of(forward, images_BCHW, labels_B)
        right_R = (~fooled(forward, images_BCHW, labels_B)).nonzero().flatten()
        if not len(right_R):
            return adversarial_BCHW
        images_RCHW, labels_R = adversarial_BCHW[right_R], labels_B[right_R]
        bounded = PyTorchModel(forward.eval(), bounds=(0, 1), device=images_BCHW.device)
        with torch.enable_grad():
            found_RCHW = from_foolbox.run(bounded, images_RCHW.float(), labels_R)
        found_RCHW = boxed(found_RCHW, images_RCHW)
        counts_R = fooled(forward, found_RCHW, labels_R)
    if threshold is not None:
        counts_R &= distance(found_RCHW, images_RCHW, "l2") <= threshold
    adversarial_BCHW[right_R] = torch.where(counts_R[:, None, None, None], found_RCHW, images_RCHW)
    return adversarial_BCHW


@contextmanager
def _root_logger() -> Iterator[None]:
    """Remove the handler that foolbox's DeepFool adds to the root logger by calling logging.info."""
    handlers = logging.root.handlers[:]
    try:
        yield
    finally:
        logging.root.handlers[:] = handlers
