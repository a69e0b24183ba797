"""Attacks at certified radii. A trial is a model, an image, a method, a norm and a start; none may succeed.

Every start ascends the margin loss over the ball that was certified for its image. Models are the parts of
small_models.py and every model of the zoo, shrunk, with random weights of three sizes or trained for a few steps.

Letters: B images, C channels, H x W pixels.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import zoo
from certify import certified_radius
from certify.api import radius_of
from certify.image.image import Image, ImageAnalysis
from certify.image.situation import Situation
from certify.methods.served import ServedImage
from certify.shared.bake import bake
from certify.shared.ball import LINF, NORMS, Ball
from certify.shared.certificate import Clean
from certizoo import UserError
from tests.tools.ascent import ascend, ascend_box, margin_loss
from tests.tools.small_models import PARTS, SMALL, distinct
from zoo.models.overview import tiny_options

SIZES = {"small": 0.3, "medium": 1.0, "large": 1.7}  # of random weights, relative to the size that preserves lengths
TRAINED = "trained"
WEIGHTS = (*SIZES, TRAINED)
KINDS = (*PARTS, *distinct())
SERVED, FORMS = "served", "forms"
METHODS = ("lofast_local", "adjoint", "image", FORMS, "best", SERVED)
STEPS = 20
WORTH = 1e-4  # the least radius of the enclosing L2 ball at which an attack could succeed


@dataclass(frozen=True)
class Subject:
    """A model and images by name: `kind` of KINDS, `weights` of WEIGHTS; the seed chooses everything random."""

    kind: str
    weights: str
    seed: int

    @property
    def name(self) -> str:
        return "dp_vit_ti" if self.kind in PARTS else self.kind

    @property
    def options(self) -> dict[str, Any]:
        return SMALL | PARTS[self.kind] if self.kind in PARTS else tiny_options(self.kind)

    def model(self) -> Any:
        torch.manual_seed(self.seed)
        model = zoo.create_model(self.name, **self.options).eval()
        return trained(model, self.images(4)) if self.weights == TRAINED else _random(model, SIZES[self.weights])

    def images(self, count: int) -> Tensor:
        """Return random images, or embedded sentences of a length that the seed chooses."""
        options = zoo.model_options(self.name, **self.options)
        size = options["img_size"]
        rows = 1 + self.seed % size if "vocabulary" in options else size
        return torch.rand((count, options["in_chans"], rows, size), generator=torch.Generator().manual_seed(self.seed))


def numbered(number: int) -> Subject:
    """Return an endless list of subjects, in which every kind meets all weights and no seed repeats."""
    turn, kind = divmod(number, len(KINDS))
    return Subject(KINDS[kind], WEIGHTS[(kind + turn) % len(WEIGHTS)], number)


def _random(model: Any, size: float) -> Any:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.copy_(torch.randn_like(p) * size * p[0].numel() ** -0.5)
            elif "bias" in name:
                p.copy_(0.1 * torch.randn_like(p))
    return model.requires_grad_(False)


def trained(model: Any, prototypes: Tensor) -> Any:
    """Train for 40 steps on noisy prototypes, for the margins and gradients of a classifier."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(40):
        y = torch.randint(len(prototypes), (64,))
        x = (prototypes[y] + 0.2 * torch.randn(64, *prototypes.shape[1:])).clamp(0, 1)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.requires_grad_(False)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one method and norm: each image's radius (B,) and the largest margin loss in its ball."""

    method: str
    norm: str
    radius_B: Tensor
    found_B: Tensor
    worth_B: Tensor  # True where the radius is large enough to test anything
    margin_B: Tensor  # the margin of the clean image

    @property
    def worth(self) -> int:
        return int(self.worth_B.sum())

    @property
    def beaten_B(self) -> Tensor:
        return ~(self.found_B < 0) & (self.radius_B > 0)

    @property
    def share(self) -> float:
        """The largest share of a margin that an attack took; the claimed loss at the radius is just below the margin.

        Shares of 1 and more beat the certificate. 0 where no image is worth an attack.
        """
        share_B = 1 + self.found_B / self.margin_B
        return float(share_B[self.worth_B].amax()) if self.worth else 0.0


def outcomes(
    subject: Subject, count: int, starts: int, methods: Sequence[str] = METHODS, norms: Sequence[str] = NORMS
) -> Iterator[Outcome]:
    """Return outcomes for `count` images, labelled by the model, and every method with rules for it."""
    model, x = subject.model(), subject.images(count)
    with torch.no_grad():
        y = model(x).argmax(-1)
        margin_B = -margin_loss(bake(model), y)(x.double())
    for method in methods:
        for norm in norms:
            try:
                radius_B = certified(model, x, y, method, norm, nonce=str(subject.seed))
            except UserError:
                continue
            found_B = attacked(model, x, y, radius_B, norm, starts, served=method == SERVED)
            worth_B = Ball(norm, x[0].numel()).radius(radius_B) > WORTH
            yield Outcome(method, norm, radius_B, found_B, worth_B, margin_B)


def certified(model: Any, x: Tensor, y: Tensor, method: str, norm: str, nonce: str) -> Tensor:
    """Return radii (B,) by one of METHODS.

    Raises UserError where it has no rules for the model.
    """
    if method == SERVED:
        return radius_of(ServedImage(model, torch.float32, nonce, norm).analyse(x, y))
    if method == FORMS:
        return radius_of(Forms(model, nonce, norm).analyse(x, y))
    return certified_radius(model, x, y, method, nonce, norm)


class FormsAnalysis(ImageAnalysis):
    """An analysis by forms alone.

    The adjoint analysis, which runs first, would hide it where it proves more, and skips the forms for what it proves.
    """

    def _situation(self, index_I: Tensor) -> Situation:
        return replace(super()._situation(index_I), proved=lambda e_I: torch.zeros_like(e_I, dtype=torch.bool))

    def _answered(self, e_B: Tensor) -> tuple[Tensor, Tensor]:
        margin_BJ = self.clean.margin_BJ
        return torch.where(e_B[:, None] > 0, torch.inf, torch.zeros_like(margin_BJ)), margin_BJ.argmin(-1)


class Forms(Image):
    """The certifier of method `image` without the help of `adjoint`."""

    def closer(self, images_BCHW: Tensor, clean: Clean) -> ImageAnalysis:
        return FormsAnalysis(self.expand(images_BCHW, clean), images_BCHW, self._seed, self.around)


def attacked(
    model: Any, x: Tensor, y: Tensor, radius_B: Tensor, norm: str, starts: int, served: bool = False
) -> Tensor:
    """Return the largest margin loss that `starts` starts for each image find: (B,).

    The attacked model is the baked float64 one, or the served float32 one at float32 points.
    """
    dtype = torch.float32 if served else torch.float64
    within_B = inside(x, radius_B, norm, dtype)
    loss = served_loss(model, y) if served else margin_loss(bake(model), y)
    if norm == LINF:
        return ascend_box(loss, x.double(), within_B, STEPS, starts // 2)  # keep two of each
    return ascend(loss, x.double(), within_B, STEPS, starts)


def inside(x: Tensor, radius_B: Tensor, norm: str, dtype: torch.dtype) -> Tensor:
    """Return the radius at which rounding a point to `dtype` cannot leave the ball."""
    size_B = x.double().flatten(1).norm(dim=1, p=torch.inf if norm == LINF else 2)
    return (radius_B * (1 - 1e-12) - torch.finfo(dtype).eps * (size_B + radius_B)).clamp_min(0)


def served_loss(model: Any, y: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the loss of the float32 model, with the gradient of the float64 one."""
    exact, real = margin_loss(bake(model), y), margin_loss(model, y)

    def loss(x: Tensor) -> Tensor:
        smooth = exact(x)
        return smooth + (real(x.detach().float()).double() - smooth).detach()

    return loss
