"""The points of an attack: created inside ball and box, judged by the model, and the worst of each image kept.

Projecting on the ball and then on the box satisfies both. x_i lies in [0,1], so clipping z_i to [0,1] moves it towards
x_i or not at all: |clip(z_i) - x_i| <= |z_i - x_i| for every i, hence ||clip(z) - x||_p <= ||z - x||_p <= eps for p = 2
and p = inf. (It need not be the nearest point of the intersection; the threat model does not require that.)

Legend: B batch, R those of its images that are still attacked (`rows`), C channels, H W pixels, K classes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from certizoo.attacks.attack import Draws
from certizoo.attacks.norms import Norm

Rows = Tensor | slice


class Threat:
    """The threat model: the only place where points are created, so all of them lie in ball and box.

    It works in place on its own tensors: on a CPU, fresh memory for a batch costs more than the sum.
    """

    def __init__(self, images_BCHW: Tensor, norm: Norm, eps: float) -> None:
        self.images_BCHW, self.norm, self.eps = images_BCHW, norm, eps

    def _inside(self, delta_BCHW: Tensor) -> Tensor:
        """Move x + delta into ball and box; may overwrite `delta_BCHW`."""
        return self.norm.project(delta_BCHW, self.eps).add_(self.images_BCHW).clamp_(0, 1)

    def of(self, rows: Rows) -> "Threat":
        """Return the threat model of these images alone."""
        return Threat(self.images_BCHW[rows], self.norm, self.eps)

    def random(self, draws: Draws) -> Tensor:
        """Return random points, drawn on the generator's device: a CPU generator gives equal starts on all devices."""
        if isinstance(draws, Sequence):
            alone = (self.of(slice(i, i + 1)).random(of_image) for i, of_image in enumerate(draws))
            return torch.cat([self.images_BCHW[:0], *alone])
        like = self.images_BCHW
        place = draws.device if draws is not None else like.device

        def draw(numbers: Callable[..., Tensor]) -> Tensor:
            return numbers(like.shape, generator=draws, device=place, dtype=like.dtype).to(like.device)

        return self._inside(self.norm.random(draw, self.eps))

    def step(self, x_BCHW: Tensor, grad_BCHW: Tensor, alpha: float) -> Tensor:
        """Take a step.

        A gradient that is not finite moves nothing: even a broken model gets images in the threat model.
        """
        ascent_BCHW = self.norm.ascent(grad_BCHW.nan_to_num(0.0, 0.0, 0.0))
        return self._inside((x_BCHW - self.images_BCHW).add_(ascent_BCHW, alpha=alpha))


class Judge:
    """The loss loss_B and fooled_B at a point, and the loss's gradient. Logits are judged in float32 or better."""

    def __init__(self, model: nn.Module, labels_B: Tensor, loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.model, self.targets, self.loss_of = model, labels_B, loss_of
        self.labels_B = labels_B if labels_B.ndim == 1 else labels_B.argmax(dim=1)
        self.dtype = next((parameter.dtype for parameter in model.parameters()), None)

    def of(self, rows: Rows) -> "Judge":
        """Return the judge of these images alone."""
        return Judge(self.model, self.targets[rows], self.loss_of)

    def _judged(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        # Under autocast the model casts by itself, after normalising in full precision.
        as_it_is = self.dtype is None or torch.is_autocast_enabled(x_BCHW.device.type)
        logits_BK = self.model(x_BCHW if as_it_is else x_BCHW.to(self.dtype))
        logits_BK = logits_BK.to(torch.promote_types(logits_BK.dtype, torch.float32))
        return self.loss_of(logits_BK, self.targets), logits_BK.argmax(dim=1) != self.labels_B

    def __call__(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return self._judged(x_BCHW)

    def with_gradient(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take the gradient of the sum over the batch: no image's gradient depends on its neighbours."""
        with torch.enable_grad():
            x_BCHW = x_BCHW.detach().requires_grad_(True)
            loss_B, fooled_B = self._judged(x_BCHW)
            (grad_BCHW,) = torch.autograd.grad(loss_B.sum(), x_BCHW)
        return loss_B.detach(), fooled_B, grad_BCHW


class Worst:
    """The worst point so far of every image: one that fools beats one that does not, then the higher loss."""

    def __init__(self, x_BCHW: Tensor, loss_B: Tensor, fooled_B: Tensor) -> None:
        self.x_BCHW, self.loss_B, self.fooled_B = x_BCHW.clone(), loss_B, fooled_B

    def see(self, rows: Rows, x_RCHW: Tensor, loss_R: Tensor, fooled_R: Tensor) -> None:
        higher_R = (fooled_R == self.fooled_B[rows]) & (loss_R > self.loss_B[rows])
        better_R = (fooled_R & ~self.fooled_B[rows]) | higher_R
        self.x_BCHW[rows] = torch.where(better_R[:, None, None, None], x_RCHW, self.x_BCHW[rows])
        self.loss_B[rows] = torch.where(better_R, loss_R, self.loss_B[rows])
        self.fooled_B[rows] = self.fooled_B[rows] | fooled_R

    def unfooled(self, rows: Rows, x_RCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows that nothing has fooled yet, and their points."""
        open_R = ~self.fooled_B[rows]
        return torch.arange(len(self.x_BCHW), device=x_RCHW.device)[rows][open_R], x_RCHW[open_R]
