"""AutoAttack (Croce & Hein 2020, https://arxiv.org/abs/2003.01690) by its authors; the only import of pyautoattack.

In order, on the images that survived so far: APGD on cross-entropy, APGD on the targeted DLR loss, FAB (targeted) and
Square, 100 iterations and 5000 queries, with the settings of their version `standard`. The number of targets is the
number of other classes, at most nine. Its draws are for the whole batch of a call (`together`).

Legend: B batch, C channels, H W pixels, K classes.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from certizoo import UserError
from certizoo.attacks.attack import Draws
from certizoo.attacks.guard import Forward, classes_of, inside
from certizoo.attacks.loop import probing
from certizoo.attacks.norms import NormName
from certizoo.config.schema import Count, Positive, Section, Whole
from certizoo.inputs import labels_given, require_radius
from certizoo.norms import LINF, NAMES

STANDARD = ("apgd-ce", "apgd-t", "fab-t", "square")
LEAST_CLASSES = {"apgd-ce": 2, "apgd-dlr": 3, "apgd-t": 4, "fab": 2, "fab-t": 2, "square": 2}
TARGETS = 9
LEAST_SIDE = 5  # pixels: Square's first step in L2 tiles the image five by five

log = logging.getLogger(__name__)
log.addHandler(logging.NullHandler())  # the authors' messages are for users who configure this logger


@dataclass(frozen=True)
class AutoAttack(Section):
    """AutoAttack with norm 'linf' or 'l2' and eps in [0,1] pixel units.

    Attributes:
        attacks: a subset of LEAST_CLASSES, run in that order.
        queries: of Square, per image.

    Raises:
        UserError: naming the key with a wrong value; also from `run` for a model with too few classes.
    """

    together: ClassVar[bool] = True
    norm: NormName = LINF
    eps: Positive = 8 / 255
    attacks: tuple[str, ...] = STANDARD
    seed: Whole = 0
    queries: Count = 5000

    def __post_init__(self) -> None:
        super().__post_init__()
        require_radius("autoattack: eps", self.eps, self.norm)
        if not self.attacks or set(self.attacks) - set(LEAST_CLASSES):
            raise UserError(f"autoattack: attacks={list(self.attacks)}; choose some of {', '.join(LEAST_CLASSES)}")

    def require_model(self, model: nn.Module, classes: int, side: int) -> None:
        """Raise UserError for a model with too few classes or too small images."""
        for name in self.attacks:
            if classes < LEAST_CLASSES[name]:
                able = [name for name in self.attacks if classes >= LEAST_CLASSES[name]]
                raise UserError(
                    f"{name} needs {LEAST_CLASSES[name]} classes or more, but the model has {classes}; "
                    f"set its attacks=[{','.join(able or ('apgd-ce', 'fab-t', 'square'))}]"
                )
        if "square" in self.attacks and side < LEAST_SIDE:
            raise UserError(f"square needs images of {LEAST_SIDE} pixels a side or more, but these have {side}")

    def run(self, model: nn.Module, images_BCHW: Tensor, labels_B: Tensor, draws: Draws = None) -> Tensor:
        """Return adversarial_BCHW; images that nothing fooled are returned unchanged.

        `seed` is used instead of `draws`.
        """
        labels_B = labels_given(images_BCHW, labels_B)
        if not len(images_BCHW):
            return images_BCHW.clone()
        forward, x_BCHW = Forward(model), images_BCHW.detach().float()
        with probing(model), _global_state(x_BCHW.device):
            found_BCHW, _ = self._authors(forward, x_BCHW, labels_B).run_standard_evaluation(
                x_BCHW, labels_B, batch_size=len(x_BCHW)
            )
        return inside(found_BCHW, images_BCHW, self.norm, self.eps)

    def _authors(self, forward: Forward, x_BCHW: Tensor, labels_B: Tensor) -> Any:
        """Return the authors' object, configured for the model's number of classes."""
        from pyautoattack import AutoAttack as Authors

        classes = classes_of(forward, x_BCHW, labels_B)
        self.require_model(forward, classes, min(x_BCHW.shape[2:]))
        authors = Authors(forward, norm=NAMES[self.norm], eps=self.eps, seed=self.seed, device=x_BCHW.device)
        authors.attacks_to_run = list(self.attacks)
        authors.apgd_targeted.n_target_classes = authors.fab.n_target_classes = min(TARGETS, classes - 1)
        authors.square.n_queries = self.queries
        authors.logger = authors.apgd.logger = authors.apgd_targeted.logger = log
        return authors


@contextmanager
def _global_state(device: torch.device) -> Iterator[None]:
    """Restore torch's global generators, which the authors seed, and the trace function, which they remove."""
    trace = sys.gettrace()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            sys.settrace(trace)
