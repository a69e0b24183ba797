"""Checks that warn of attacked accuracies that may be too high: masked gradients, weak attacks, outputs without logits.

They follow the flags of AutoAttack (Croce & Hein 2020, flags_doc.md of its repository) and Carlini et al. 2019, "On
Evaluating Adversarial Robustness", section 5 (docs/references.md#evaluating). A flag is a reason to distrust the
attacked accuracy, which may then be far above the true one. It says nothing about a certificate, which does not depend
on attacks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import pandas as pd
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from certizoo.attacks import AttackConfig
from certizoo.attacks.attack import Attack
from certizoo.attacks.auto import AutoAttack
from certizoo.attacks.loop import probing

STEPS, MORE_STEPS = 20, 100
QUERIES = 1000  # queries of Square, which beats masked gradients long before its 5000
CHANCE = 0.1  # allowed accuracy above chance in a ball that contains a grey image
SAME = 1e-5  # relative difference of two answers to one image; GPUs sum in varying order
FULL = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Flag:
    """The name of a check in this module, and a message with what it found."""

    name: str
    message: str


@dataclass(frozen=True)
class Case:
    """The attacked model, some correctly classified images, and the ball in which they are attacked."""

    model: nn.Module
    images_BCHW: Tensor
    labels_B: Tensor
    norm: str
    eps: float

    def survivors(self, attack: Attack) -> Tensor:
        """Return which images keep their label (B,)."""
        found = attack.run(self.model, self.images_BCHW, self.labels_B, Generator().manual_seed(0))
        return self.logits(found).argmax(1) == self.labels_B

    def logits(self, images_BCHW: Tensor) -> Tensor:
        with torch.no_grad(), probing(self.model):
            logits: Tensor = self.model(images_BCHW)
        return logits

    @cached_property
    def after_pgd(self) -> Tensor:
        """The survivors of MORE_STEPS steps, which two checks use."""
        return self.survivors(self.pgd(MORE_STEPS))

    def pgd(self, steps: int) -> AttackConfig:
        return AttackConfig(norm=self.norm, eps=self.eps, steps=steps, loss="margin")


def of_model(case: Case) -> list[Flag]:
    """Return the flags that the model's behaviour raises; none without images."""
    if not len(case.labels_B):
        return []
    return [Flag(check.__name__, said) for check in CHECKS for said in check(case)]


def random_answers(case: Case) -> Iterator[str]:
    first, second = (case.logits(case.images_BCHW) for _ in range(2))
    difference = float((first - second).abs().max() / (1 + first.abs().max()))
    if difference > SAME:
        yield (
            f"two answers to the same images differ by {difference:.2g}: attacks need the expectation over the model's "
            "randomness (EOT); use AutoAttack's version 'rand'"
        )


def softmax_outputs(case: Case) -> Iterator[str]:
    logits = case.logits(case.images_BCHW)
    if bool((logits >= 0).all()) and torch.allclose(logits.sum(1), torch.ones(len(logits)).to(logits), atol=1e-4):
        yield "the outputs are probabilities: their softmax hides gradients; attack the logits"


def zero_gradients(case: Case) -> Iterator[str]:
    """Yield a message if cross-entropy has no gradient, as the attacks see it."""
    with probing(case.model), torch.enable_grad():
        x_BCHW = case.images_BCHW.clone().requires_grad_(True)
        loss = F.cross_entropy(case.model(x_BCHW), case.labels_B, reduction="sum")
        gradient = torch.autograd.grad(loss, x_BCHW, allow_unused=True)[0] if loss.requires_grad else None
    silent = len(x_BCHW) if gradient is None else int((gradient.flatten(1).abs().amax(1) == 0).sum())
    if silent:
        yield (
            f"the loss has no gradient at {silent} of {len(x_BCHW)} images: saturated or quantised, so that attacks by "
            "gradient cannot move; trust only black-box and transfer attacks"
        )


def more_steps_raise_accuracy(case: Case) -> Iterator[str]:
    few, more = (int(left.sum()) for left in (case.survivors(case.pgd(STEPS)), case.after_pgd))
    if more > few:
        yield (
            f"PGD of {MORE_STEPS} steps leaves {more} of {len(case.labels_B)} images, of {STEPS} steps only {few}: "
            "gradients mislead"
        )


def large_ball_leaves_accuracy(case: Case) -> Iterator[str]:
    """Yield a message if images survive in a ball with Linf 1/2 or L2 sqrt(n)/2.

    Every image can become grey there, so that a model can only guess.
    """
    image = case.images_BCHW[0]
    large = 0.5 if case.norm == "linf" else 0.5 * image.numel() ** 0.5
    left = float(case.survivors(replace(case.pgd(MORE_STEPS), eps=large)).float().mean())
    chance = 1 / case.logits(case.images_BCHW[:1]).shape[1]
    if left > chance + CHANCE:
        yield (
            f"PGD in a ball that makes every image grey ({case.norm} {large:g}) leaves {left:.0%}, chance is "
            f"{chance:.0%}: the attack does not work on this model"
        )


def black_box_beats_white_box(case: Case) -> Iterator[str]:
    """Yield a message if Square finds more. Its library takes square images, so sentences are left out."""
    white = case.after_pgd
    height, width = case.images_BCHW.shape[2:]
    if bool(white.any()) and height == width:
        square = AutoAttack(norm=case.norm, eps=case.eps, attacks=("square",), queries=QUERIES)
        broken = int((white & ~case.survivors(square)).sum())
        if broken:
            yield (
                f"Square, which uses no gradient, breaks {broken} images that PGD of {MORE_STEPS} steps leaves: "
                "gradients are masked"
            )


def lower_precision(case: Case) -> Iterator[str]:
    dtypes = {parameter.dtype for parameter in case.model.parameters()}
    lower = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype not in FULL)
    if lower:
        yield f"attacks compute in {', '.join(lower)}: rounding looks like robustness; attack in float32"
    elif case.images_BCHW.is_cuda and torch.get_float32_matmul_precision() != "highest":
        yield "attacks compute in TF32 matrix products; torch.set_float32_matmul_precision('highest') gives float32"


CHECKS: tuple[Callable[[Case], Iterator[str]], ...] = (
    random_answers,
    softmax_outputs,
    zero_gradients,
    more_steps_raise_accuracy,
    large_ball_leaves_accuracy,
    black_box_beats_white_box,
    lower_precision,
)


def of_table(table: pd.DataFrame, attacks: Mapping[str, Attack]) -> list[Flag]:
    """Return the flags that the outcomes raise: pairs of attacks in one ball of which the weaker one finds more."""
    flags = []
    for one, other in combinations(attacks, 2):
        for weak, strong in ((one, other), (other, one)):
            if _should_be_stronger(attacks[strong], attacks[weak]):
                missed = table.loc[table[f"survives.{strong}"] & ~table[f"survives.{weak}"], "key"]
                raised = float(table[f"survives.{strong}"].mean()) > float(table[f"survives.{weak}"].mean())
                if raised or (isinstance(attacks[strong], AutoAttack) and len(missed)):
                    keys = ", ".join(missed.astype(str).head(3))
                    said = f"{weak} breaks {len(missed)} images that {strong} does not: {keys}"
                    flags.append(Flag("weaker_attack_finds_more", said))
    return flags


def _should_be_stronger(strong: Attack, weak: Attack) -> bool:
    """Return whether one attack should beat another in the same ball.

    The whole of AutoAttack should beat anything else; of two PGD attacks with one loss, the one with more steps or
    restarts.
    """
    if strong.eps is None or (strong.norm, strong.eps) != (weak.norm, weak.eps):
        return False
    if isinstance(strong, AutoAttack):
        return not isinstance(weak, AutoAttack) and len(strong.attacks) > 1
    if not isinstance(strong, AttackConfig) or not isinstance(weak, AttackConfig) or strong.loss != weak.loss:
        return False
    budgets = [(attack.steps, attack.restarts) for attack in (weak, strong)]
    return budgets[0] != budgets[1] and all(less <= more for less, more in zip(*budgets, strict=True))
