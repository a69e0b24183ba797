"""Projected gradient ascent, implemented once for every norm and loss.

    delta_0   = a random point of the ball, or 0
    delta_t+1 = clip(project(delta_t + alpha * ascent(grad_x loss(f(x + delta_t), y)), eps))

Madry et al., https://arxiv.org/abs/1706.06083; FGSM: Goodfellow et al., https://arxiv.org/abs/1412.6572; its random
start: Wong et al., https://arxiv.org/abs/2001.03994.

Projecting on the ball and then on the box satisfies both. x_i lies in [0,1], so clipping z_i to [0,1] moves it towards
x_i or not at all: |clip(z_i) - x_i| <= |z_i - x_i| for every i, hence ||clip(z) - x||_p <= ||z - x||_p <= eps for p = 2
and p = inf. (It need not be the nearest point of the intersection; the threat model does not require that.)

Legend: B batch, R those of its images that are still attacked (`rows`), C channels, H W pixels, K classes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from certizoo.attacks.attack import Draws
from certizoo.attacks.attention import loss_of
from certizoo.attacks.norms import NORMS, Norm

Disturb = Callable[[Tensor, Tensor], Tensor]
Rows = Tensor | slice


def pgd(
    model: nn.Module,
    images_BCHW: Tensor,
    labels_B: Tensor,
    *,
    norm: str,
    eps: float,
    steps: int,
    step_size: float | None = None,
    random_start: bool = True,
    restarts: int = 1,
    loss: str = "ce",
    generator: Draws = None,
    keep_worst: bool = True,
    stop_when_fooled: bool = False,
    disturb: Disturb | None = None,
) -> Tensor:
    """adversarial_BCHW with ||adversarial - images||_p <= eps and every value in [0,1].

    Args:
        model: images in [0,1] (normalisation inside) -> logits_BK. Its mode, and its parameters' `.grad` and
            `requires_grad`, are afterwards as before. It gets images of its own dtype (under autocast: of theirs).
        labels_B: classes; or, with loss "ce", probabilities labels_BK (mixed labels, another model's answers), of which
            the largest counts as the class.
        norm: "linf" or "l2" (over the whole image); `eps` in [0,1] pixel units.
        step_size: alpha; default 2.5 eps / steps.
        restarts: runs from fresh random starts; more than one needs `random_start`.
        loss: a name of `attacks.losses.LOSSES`, or "attention" (attention.py).
        generator: source of the random starts; with it the attack is a function of its arguments. A sequence of
            generators, one an image: then the start of an image does not depend on its neighbours either.
        keep_worst: return, image by image, the worst point visited, the clean image included: more steps of the same
            size and more restarts then never help the model. Costs two forwards. False: the last iterate, which is
            what adversarial training uses.
        stop_when_fooled: an image leaves the batch at its first point that fools, which is what it gets; needs
            keep_worst. The same images survive, up to the rounding of the model in batches of other sizes.
        disturb: (images_BCHW, x_BCHW) -> a point between the two, from which a step is taken instead of x.

    Raises: ValueError for images outside [0,1] (normalised twice?) or arguments that contradict each other.
    """
    _check(images_BCHW, eps, steps, random_start, restarts, keep_worst, stop_when_fooled, generator)
    if not len(images_BCHW):
        return images_BCHW.clone()
    alpha = 2.5 * eps / steps if step_size is None else step_size
    threat = _Threat(images_BCHW.detach(), NORMS[norm], eps)
    with probing(model), loss_of(loss, model) as climbed:
        judge = _Judge(model, labels_B, climbed)
        x_RCHW = threat.images_BCHW
        worst = _Worst(x_RCHW, *judge(x_RCHW)) if keep_worst else None
        for _ in range(restarts):
            rows: Rows = slice(None)
            x_RCHW = threat.random(generator) if random_start else threat.images_BCHW
            for _ in range(steps):
                if worst and stop_when_fooled:
                    rows, x_RCHW = worst.unfooled(rows, x_RCHW)
                    if not len(x_RCHW):
                        break
                near, at = threat.of(rows), judge.of(rows)
                x_RCHW = disturb(near.images_BCHW, x_RCHW) if disturb else x_RCHW
                loss_R, fooled_R, grad_RCHW = at.with_gradient(x_RCHW)
                if worst:
                    worst.see(rows, x_RCHW, loss_R, fooled_R)
                x_RCHW = near.step(x_RCHW, grad_RCHW, alpha)
            if worst and len(x_RCHW):
                worst.see(rows, x_RCHW, *judge.of(rows)(x_RCHW))
    return worst.x_BCHW if worst else x_RCHW


def fgsm(
    model: nn.Module,
    images_BCHW: Tensor,
    labels_B: Tensor,
    *,
    norm: str,
    eps: float,
    steps: int = 1,
    step_size: float | None = None,
    random_start: bool = False,
    restarts: int = 1,
    loss: str = "ce",
    generator: Draws = None,
    keep_worst: bool = True,
) -> Tensor:
    """One step to the surface of the ball: `pgd` with steps=1 and alpha = eps (1.25 eps from a random start)."""
    if steps != 1:
        raise ValueError(f"FGSM takes one step, not {steps}; use pgd")
    alpha = (1.25 * eps if random_start else eps) if step_size is None else step_size
    return pgd(
        model, images_BCHW, labels_B, norm=norm, eps=eps, steps=1, step_size=alpha, random_start=random_start,
        restarts=restarts, loss=loss, generator=generator, keep_worst=keep_worst,
    )  # fmt: skip


@contextmanager
def probing(model: nn.Module) -> Iterator[None]:
    """Set eval mode and disable gradients of parameters; restore both per module, also after an exception.

    Otherwise each backward pass would compute the gradient of every weight too, and dropout would add noise to the
    attack.
    """
    training = [module for module in model.modules() if module.training]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for module in training:
            module.training = False
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True


class _Threat:
    """The threat model: the only place where points are created, so all of them lie in ball and box.

    It works in place on its own tensors: on a CPU, fresh memory for a batch costs more than the sum.
    """

    def __init__(self, images_BCHW: Tensor, norm: Norm, eps: float) -> None:
        self.images_BCHW, self.norm, self.eps = images_BCHW, norm, eps

    def _inside(self, delta_BCHW: Tensor) -> Tensor:
        """Move x + delta into ball and box; may overwrite `delta_BCHW`."""
        return self.norm.project(delta_BCHW, self.eps).add_(self.images_BCHW).clamp_(0, 1)

    def of(self, rows: Rows) -> "_Threat":
        return _Threat(self.images_BCHW[rows], self.norm, self.eps)

    def random(self, generator: Draws) -> Tensor:
        """Return random points, drawn on the generator's device: a CPU generator gives equal starts on all devices."""
        if isinstance(generator, Sequence):
            alone = (self.of(slice(i, i + 1)).random(of_image) for i, of_image in enumerate(generator))
            return torch.cat([self.images_BCHW[:0], *alone])
        like = self.images_BCHW
        place = generator.device if generator is not None else like.device

        def draw(numbers: Callable[..., Tensor]) -> Tensor:
            return numbers(like.shape, generator=generator, device=place, dtype=like.dtype).to(like.device)

        return self._inside(self.norm.random(draw, self.eps))

    def step(self, x_BCHW: Tensor, grad_BCHW: Tensor, alpha: float) -> Tensor:
        """Take a step.

        A gradient that is not finite moves nothing: even a broken model gets images in the threat model.
        """
        ascent_BCHW = self.norm.ascent(grad_BCHW.nan_to_num(0.0, 0.0, 0.0))
        return self._inside((x_BCHW - self.images_BCHW).add_(ascent_BCHW, alpha=alpha))


class _Judge:
    """The loss loss_B and fooled_B at a point, and the loss's gradient. Logits are judged in float32 or better."""

    def __init__(self, model: nn.Module, labels_B: Tensor, loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.model, self.targets, self.loss_of = model, labels_B, loss_of
        self.labels_B = labels_B if labels_B.ndim == 1 else labels_B.argmax(dim=1)
        self.dtype = next((parameter.dtype for parameter in model.parameters()), None)

    def of(self, rows: Rows) -> "_Judge":
        return _Judge(self.model, self.targets[rows], self.loss_of)

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


class _Worst:
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


def _check(
    images_BCHW: Tensor,
    eps: float,
    steps: int,
    random_start: bool,
    restarts: int,
    keep_worst: bool,
    stop_when_fooled: bool,
    draws: Draws,
) -> None:
    if images_BCHW.numel() and not (images_BCHW.min() >= 0 and images_BCHW.max() <= 1):
        raise ValueError("images must lie in [0,1]: normalisation belongs inside the model")
    if eps < 0 or steps < 1 or restarts < 1:
        raise ValueError(f"need eps >= 0, steps >= 1, restarts >= 1; got {eps}, {steps}, {restarts}")
    if restarts > 1 and not (random_start and keep_worst):
        raise ValueError("several restarts need random_start and keep_worst")
    if stop_when_fooled and not keep_worst:
        raise ValueError("stop_when_fooled needs keep_worst")
    if isinstance(draws, Sequence) and len(draws) != len(images_BCHW):
        raise ValueError(f"{len(draws)} generators for {len(images_BCHW)} images; need one, or one an image")
