"""Minimal-norm attacks: the nearest image that fools, at any distance.

    CW        min_w ||x' - x||_2^2 + c max(0, z_y - max_{j != y} z_j + kappa),  x' = (tanh(w) + 1)/2, by Adam;
              the nearest of the points that fooled is kept
    DeepFool  x' <- x' + the step to the nearest boundary of the model linearised at x', until it fools

Carlini & Wagner, https://arxiv.org/abs/1608.04644; Moosavi-Dezfooli et al., https://arxiv.org/abs/1511.04599. Constants
that the papers leave open are those of foolbox, the oracle of the tests.

Neither is random, and no image depends on its neighbours: an image's result is the same in every batch, up to the
model's rounding. Images that are misclassified already, or that nothing fooled, are returned unchanged.

Legend: B batch, R those of its images that were correct, C channels, H W pixels, K classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from certizoo.attacks.attack import Draws
from certizoo.attacks.guard import Forward, boxed, classes_of, fooled
from certizoo.attacks.loop import probing
from certizoo.attacks.norms import distance
from certizoo.config.schema import Count, Ge, NonNegative, Positive, Section
from certizoo.inputs import labels_given
from certizoo.norms import L2

OPEN = 0.999999  # keeps pixels 0 and 1 away from the ends of tanh
BEYOND, SMALL = 1e-4, 1e-8  # DeepFool: what a step adds to its length, and to the norm of a gradient
Search = Callable[[Forward, Tensor, Tensor], Tensor]  # (forward, images_RCHW, labels_R) -> found_RCHW


@dataclass(frozen=True)
class CarliniWagner(Section):
    """Carlini & Wagner in L2. The defaults are those of CoViT, section 5.3: c = 1 without a search, kappa = 0.

    Attributes:
        threshold: an image that fools from beyond this L2 distance in [0,1] pixel units does not count; None allows any
            distance.
    """

    norm: ClassVar[str] = L2
    eps: ClassVar[float | None] = None
    together: ClassVar[bool] = False
    c: Positive = 1.0
    confidence: NonNegative = 0.0
    lr: Positive = 0.01
    steps: Count = 100
    binary_search_steps: Count = 1
    threshold: Positive | None = None

    def require_model(self, model: nn.Module, classes: int, side: int) -> None:
        """Accept every model."""

    def run(self, model: nn.Module, images_BCHW: Tensor, labels_B: Tensor, draws: Draws = None) -> Tensor:
        """Return adversarial_BCHW; `draws` is unused: nothing is drawn."""
        return _nearest(self._search, model, images_BCHW, labels_B, self.threshold)

    def _search(self, forward: Forward, images_RCHW: Tensor, labels_R: Tensor) -> Tensor:
        """Return the nearest point that fooled, over a search for the smallest c that suffices, image by image."""
        c_R = torch.full((len(labels_R),), self.c, dtype=torch.float64, device=images_RCHW.device)
        low_R, high_R = torch.zeros_like(c_R), torch.full_like(c_R, torch.inf)
        best = Nearest(images_RCHW)
        for step in range(self.binary_search_steps):
            if step == self.binary_search_steps - 1 >= 9:  # a long search ends at a c that sufficed
                c_R = high_R.clamp(max=1e10)
            fooled_R = self._descend(forward, images_RCHW, labels_R, c_R.float(), best)
            low_R, high_R = torch.where(fooled_R, low_R, c_R), torch.where(fooled_R, c_R, high_R)
            c_R = torch.where(high_R.isinf(), 10 * c_R, (low_R + high_R) / 2)
        return best.x_RCHW

    def _descend(self, forward: Forward, images_RCHW: Tensor, labels_R: Tensor, c_R: Tensor, best: "Nearest") -> Tensor:
        """Take the steps of Adam for one c and keep the nearest points in `best`; return who was fooled."""
        start_RCHW = ((2 * images_RCHW - 1) * OPEN).arctanh()
        origin_RCHW = start_RCHW.tanh() / 2 + 0.5
        change_RCHW = torch.zeros_like(start_RCHW, requires_grad=True)
        adam, ever_R = torch.optim.Adam([change_RCHW], self.lr), torch.zeros_like(labels_R, dtype=torch.bool)
        own_RK = nn.functional.one_hot(labels_R, forward(images_RCHW[:1]).shape[1]).bool()
        for _ in range(self.steps):
            x_RCHW = (start_RCHW + change_RCHW).tanh() / 2 + 0.5
            logits_RK = forward(x_RCHW)
            gap_R = logits_RK[own_RK] - logits_RK.masked_fill(own_RK, -torch.inf).amax(1) + self.confidence
            loss = (c_R * gap_R.relu()).sum() + (x_RCHW - origin_RCHW).square().sum()
            (change_RCHW.grad,) = torch.autograd.grad(loss, change_RCHW)
            adam.step()
            ever_R |= best.see(x_RCHW.detach(), gap_R < 0)
        return ever_R


class Nearest:
    """The nearest point of each image that fooled so far; the image itself before any did."""

    def __init__(self, images_RCHW: Tensor) -> None:
        self.images_RCHW = self.x_RCHW = images_RCHW
        self.away_R = images_RCHW.new_full((len(images_RCHW),), torch.inf)

    def see(self, x_RCHW: Tensor, fools_R: Tensor) -> Tensor:
        """Take over what fools from nearer; return fools_R."""
        away_R = distance(x_RCHW, self.images_RCHW, L2)
        nearer_R = fools_R & (away_R < self.away_R)
        self.x_RCHW = torch.where(nearer_R[:, None, None, None], x_RCHW, self.x_RCHW)
        self.away_R = torch.where(nearer_R, away_R, self.away_R)
        return fools_R


@dataclass(frozen=True)
class DeepFool(Section):
    """DeepFool in L2: it tries the boundaries of the `candidates` likeliest classes and goes `overshoot` beyond."""

    norm: ClassVar[str] = L2
    eps: ClassVar[float | None] = None
    together: ClassVar[bool] = False
    steps: Count = 50
    candidates: Annotated[int, Ge(2)] = 10
    overshoot: NonNegative = 0.02

    def require_model(self, model: nn.Module, classes: int, side: int) -> None:
        """Accept every model."""

    def run(self, model: nn.Module, images_BCHW: Tensor, labels_B: Tensor, draws: Draws = None) -> Tensor:
        """Return adversarial_BCHW; `draws` is unused: nothing is drawn."""
        return _nearest(self._search, model, images_BCHW, labels_B, None)

    def _search(self, forward: Forward, images_RCHW: Tensor, labels_R: Tensor) -> Tensor:
        """Return x + (1 + overshoot) sum_i p_i, where p_i is the step to the nearest linearised boundary."""
        order_RK = forward(images_RCHW).argsort(1, descending=True)[:, : self.candidates]
        x_RCHW, steps_RCHW = images_RCHW, torch.zeros_like(images_RCHW)
        for _ in range(self.steps):
            x_RCHW = x_RCHW.detach().requires_grad_()
            logits_RK = forward(x_RCHW)
            fools_R = logits_RK.argmax(1) != labels_R
            if bool(fools_R.all()):
                break
            gaps_RK = logits_RK.gather(1, order_RK[:, 1:]) - logits_RK.gather(1, order_RK[:, :1])
            steps_RCHW = steps_RCHW + _to_the_nearest(gaps_RK, x_RCHW)
            moved_RCHW = (images_RCHW + (1 + self.overshoot) * steps_RCHW).clamp(0, 1)
            x_RCHW = torch.where(fools_R[:, None, None, None], x_RCHW, moved_RCHW)
        return x_RCHW.detach()


def _to_the_nearest(gaps_RK: Tensor, x_RCHW: Tensor) -> Tensor:
    """Return the step |f_k| g_k / ||g_k||^2 of the k with the least |f_k| / ||g_k||, for gaps f_k of gradient g_k."""
    g_RKCHW = torch.stack([torch.autograd.grad(gap_R.sum(), x_RCHW, retain_graph=True)[0] for gap_R in gaps_RK.T], 1)
    norm_RK = g_RKCHW.flatten(2).norm(dim=2) + SMALL
    away_R, k_R = (gaps_RK.detach().abs() / norm_RK).min(1)
    rows = torch.arange(len(k_R), device=k_R.device)
    return ((away_R + BEYOND) / norm_RK[rows, k_R])[:, None, None, None] * g_RKCHW[rows, k_R]


def _nearest(
    search: Search, model: nn.Module, images_BCHW: Tensor, labels_B: Tensor, threshold: float | None
) -> Tensor:
    """Return what a search in float32 finds for the images that are correct, if it fools within the threshold."""
    labels_B = labels_given(images_BCHW, labels_B)
    forward, adversarial_BCHW = Forward(model), images_BCHW.detach().clone()
    if not len(labels_B):
        return adversarial_BCHW
    with probing(model):
        classes_of(forward, images_BCHW, labels_B)
        right_R = (~fooled(forward, images_BCHW, labels_B)).nonzero().flatten()
        if not len(right_R):
            return adversarial_BCHW
        images_RCHW, labels_R = adversarial_BCHW[right_R], labels_B[right_R]
        with torch.enable_grad():
            found_RCHW = search(forward, images_RCHW.float(), labels_R)
        found_RCHW = boxed(found_RCHW, images_RCHW)
        counts_R = fooled(forward, found_RCHW, labels_R)
    if threshold is not None:
        counts_R &= distance(found_RCHW, images_RCHW, L2) <= threshold
    adversarial_BCHW[right_R] = torch.where(counts_R[:, None, None, None], found_RCHW, images_RCHW)
    return adversarial_BCHW
