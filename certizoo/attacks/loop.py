"""Projected gradient ascent, implemented once for every norm and loss.

    delta_0   = a random point of the ball, or 0
    delta_t+1 = clip(project(delta_t + alpha * ascent(grad_x loss(f(x + delta_t), y)), eps))

Madry et al., https://arxiv.org/abs/1706.06083; FGSM: Goodfellow et al., https://arxiv.org/abs/1412.6572; its random
start: Wong et al., https://arxiv.org/abs/2001.03994.

Legend: B batch, R those of its images that are still attacked (`rows`), C channels, H W pixels.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from certizoo import UserError
from certizoo.attacks.attack import Draws
from certizoo.attacks.attention import LOSS_NAMES, loss_of
from certizoo.attacks.losses import refusing, require_three
from certizoo.attacks.norms import NORMS, NormName
from certizoo.attacks.points import Judge, Rows, Threat, Worst
from certizoo.config.schema import Count, NonNegative, Positive, Section
from certizoo.inputs import labels_given, require_radius
from certizoo.nearest import unknown
from certizoo.norms import LINF

Disturb = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AttackConfig(Section):
    """A projected gradient attack as a checked value: the content of `configs/attack/*.yaml`.

    Attributes:
        norm: "linf" or "l2" (over the whole image).
        eps: the radius in [0,1] pixel units.
        step_size: alpha, in the same units; None takes 2.5 eps / steps.
        restarts: runs from fresh random starts; more than one needs `random_start`.
        loss: a name of `attacks.losses.LOSSES`, or "attention" (attention.py).
        stop_when_fooled: remove an image from the batch at its first point that fools, and return that point. The same
            images survive, up to the rounding of the model in batches of other sizes. No effect if `pgd` returns the
            last iterate, as in training.

    Raises:
        UserError: naming the key with a wrong value.
    """

    together: ClassVar[bool] = False
    norm: NormName = LINF
    eps: NonNegative = 4 / 255
    steps: Count = 10
    step_size: Positive | None = None
    random_start: bool = True
    restarts: Count = 1
    loss: str = "ce"
    stop_when_fooled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss not in LOSS_NAMES:
            raise unknown("loss of an attack", self.loss, LOSS_NAMES)
        if self.restarts > 1 and not self.random_start:
            raise UserError(f"attack.restarts={self.restarts} would all be equal; set attack.random_start=true")
        require_radius("attack.eps", self.eps, self.norm)

    def require_model(self, model: nn.Module, classes: int, side: int) -> None:
        """Raise UserError for a loss that the model's classes or its layers do not have."""
        if self.loss == "dlr":
            require_three(classes)
        with loss_of(self.loss, model):
            pass

    def run(
        self,
        model: nn.Module,
        images_BCHW: Tensor,
        labels_B: Tensor,
        draws: Draws = None,
        keep_worst: bool = True,
        disturb: Disturb | None = None,
    ) -> Tensor:
        """Return adversarial_BCHW of `pgd` with this config."""
        return pgd(model, images_BCHW, labels_B, self, draws, keep_worst, disturb)

    def within(self, share: float) -> "AttackConfig":
        """Return the attack in a ball of this share of the radius, with steps scaled alike."""
        size = self.step_size * share if self.step_size and share else None
        return replace(self, eps=self.eps * share, step_size=size)

    def stronger(self, steps: int) -> "AttackConfig":
        """Return the attack with at least this many steps of default size, to test a model trained on few steps."""
        return self if self.steps >= steps else replace(self, steps=steps, step_size=None, random_start=True)


def pgd(
    model: nn.Module,
    images_BCHW: Tensor,
    labels_B: Tensor,
    attack: AttackConfig,
    draws: Draws = None,
    keep_worst: bool = True,
    disturb: Disturb | None = None,
) -> Tensor:
    """Return adversarial_BCHW with ||adversarial - images||_p <= eps and every value in [0,1].

    Args:
        model: images in [0,1] (normalisation inside) -> logits_BK. Its mode, and its parameters' `.grad` and
            `requires_grad`, are afterwards as before. It gets images of its own dtype (under autocast: of theirs).
        labels_B: classes; or, with loss "ce", probabilities labels_BK (mixed labels, another model's answers), of which
            the largest counts as the class.
        attack: norm, radius, steps, starts and loss.
        draws: source of the random starts; with it the attack is a function of its arguments. A sequence of generators,
            one an image: then the start of an image does not depend on its neighbours either.
        keep_worst: return, image by image, the worst point visited, the clean image included: more steps of the same
            size and more restarts then never help the model. Costs two forwards. False: the last iterate, which is
            what adversarial training uses.
        disturb: (images_BCHW, x_BCHW) -> a point between the two, from which a step is taken instead of x.

    Raises:
        UserError: for images outside [0,1] (normalised twice?), or labels that are not classes of the model.
        ValueError: for arguments that contradict each other.
    """
    labels_B = labels_given(images_BCHW, labels_B, probabilities=attack.loss == "ce")
    _check(images_BCHW, attack, draws, keep_worst)
    if not len(images_BCHW):
        return images_BCHW.clone()
    alpha = 2.5 * attack.eps / attack.steps if attack.step_size is None else attack.step_size
    threat = Threat(images_BCHW.detach(), NORMS[attack.norm], attack.eps)
    with probing(model), loss_of(attack.loss, model) as climbed:
        judge = Judge(model, labels_B, refusing(climbed, labels_B))
        x_RCHW = threat.images_BCHW
        worst = Worst(x_RCHW, *judge(x_RCHW)) if keep_worst else None
        for _ in range(attack.restarts):
            rows: Rows = slice(None)
            x_RCHW = threat.random(draws) if attack.random_start else threat.images_BCHW
            for _ in range(attack.steps):
                if worst and attack.stop_when_fooled:
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
    attack: AttackConfig,
    draws: Draws = None,
    keep_worst: bool = True,
) -> Tensor:
    """Take one step to the surface of the ball: `pgd` with alpha = eps, or 1.25 eps from a random start."""
    if attack.steps != 1:
        raise ValueError(f"FGSM takes one step, not {attack.steps}; set steps=1, or use pgd")
    alpha = 1.25 * attack.eps if attack.random_start else attack.eps
    one_step = replace(attack, step_size=attack.step_size or alpha or None)  # a config refuses alpha = 0
    return pgd(model, images_BCHW, labels_B, one_step, draws, keep_worst)


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


def _check(images_BCHW: Tensor, attack: AttackConfig, draws: Draws, keep_worst: bool) -> None:
    if attack.restarts > 1 and not keep_worst:
        raise ValueError(f"attack.restarts={attack.restarts} needs keep_worst; set restarts=1, or keep_worst=True")
    if isinstance(draws, Sequence) and len(draws) != len(images_BCHW):
        raise ValueError(f"{len(draws)} generators for {len(images_BCHW)} images; need one, or one an image")
