"""The strongest certificate of a model: an image is certified if one of the model's methods certifies it.

All methods certify the same baked function, eps and set of inputs.

LoFAST replaces the Taylor certificate where that has no rules. It would prove nothing more: on 160 images
of 40 kinds of models its radius was at most 0.82 of that of `adjoint`, for a fifth of the time.

Linear bounds join where the model has units with kinks, such as ReLUs, and few of them. There they proved up to twice
the radius: of a random MLP of five layers in both norms, of two convolutions in Linf. On smooth models it was less.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from certify.linear.linear import Linear
from certify.methods import crown
from certify.methods.lofast import LoFAST
from certify.shared.bake import Model
from certify.shared.ball import L2, Ball
from certify.shared.certificate import (
    Analysis,
    Breakdown,
    Certificate,
    Certifier,
    Clean,
    Explained,
    guess_of,
    in_search,
    of_images,
)
from certify.taylor.taylor import Taylor
from certizoo.inputs import batch_given
from zoo.bounds.activations import Smooth
from zoo.bounds.rule_table import NoRule, rules_of

KINKS = 2**13  # most units with kinks for linear bounds, whose time grows with their square


def has_kinks(model: nn.Module) -> bool:
    """Return whether the model has an activation without a second derivative."""
    found = ((rules_of(module).activation, module) for module in model.modules())
    return any(rule is not None and not isinstance(rule(module), Smooth) for rule, module in found)


class BestAnalysis:
    """Several methods, cheap ones first.

    An expensive method analyses the batch only when an eps leaves one of its images open, and is left out if it has no
    bounds for the model; the first always has.
    """

    def __init__(self, certifiers: Sequence[Certifier], images_BCHW: Tensor, labels_B: Tensor) -> None:
        self._certifiers, self._batch = list(certifiers), (images_BCHW, labels_B)
        self._made: list[Analysis] = []

    @property
    def clean(self) -> Clean:
        return self._analysis(0).clean

    @property
    def ball(self) -> Ball:
        return self._analysis(0).ball

    @property
    def failure(self) -> float:
        return sum(analysis.failure for analysis in self._made)

    def at(self, eps: float | Tensor) -> Certificate:
        return self._answered(eps, lambda analysis, eps_B: analysis.at(eps_B))

    def in_search(self, eps: float | Tensor) -> Certificate:
        return self._answered(eps, in_search)

    def _answered(self, eps: float | Tensor, answer: Callable[[Analysis, float | Tensor], Certificate]) -> Certificate:
        best, k = answer(self._analysis(0), eps), 1
        while bool((open_B := best.correct_B & ~best.certified_B).any()) and self._has(k):
            other = answer(self._analysis(k), torch.where(open_B, best.eps_B, 0.0))  # eps = 0 costs nothing
            best, k = _better(best, other, open_B), k + 1
        return best

    def guess(self) -> Tensor:
        """Return the guess of the first method, without analysing by the others."""
        return guess_of(self._analysis(0))

    def breakdown(self, eps: float | Tensor) -> Breakdown:
        """Return the breakdown of the first method, the only one that has one."""
        first = self._analysis(0)
        assert isinstance(first, Explained)
        return first.breakdown(eps)

    def _analysis(self, k: int) -> Analysis:
        """Return the analysis of method k; it and those before it are built on first use."""
        while len(self._made) <= k:
            self._made.append(self._certifiers[len(self._made)].analyse(*self._batch))
        return self._made[k]

    def _has(self, k: int) -> bool:
        """Return whether there is a method k with bounds for the model."""
        while k < len(self._certifiers):
            try:
                self._analysis(k)
            except NoRule:
                del self._certifiers[k]
            else:
                return True
        return False


def _better(one: Certificate, other: Certificate, open_B: Tensor) -> Certificate:
    """Return, for each open image, the certificate that leaves more of its margin."""
    other_B = open_B & (other.margin_B - other.loss_B > one.margin_B - one.loss_B)
    return replace(of_images(other_B, other, one), certified_B=one.certified_B | (open_B & other.certified_B))


class Best:
    """The Taylor certificate where the model has its rules, else LoFAST; linear bounds; CROWN where it is installed.

    Raises NoRule where LoFAST has no rule. `nonce` and `norm` are those of `Adjoint`. Proof: docs/proofs.md#best.
    """

    def __init__(self, model: nn.Module | Model, nonce: str | None = None, norm: str = L2) -> None:
        try:
            first: Certifier = Taylor(model, nonce, norm)
        except NoRule:
            first = LoFAST(model, norm)
        self.baked, self.certifiers = first.baked, [first]
        if has_kinks(self.baked):
            self.certifiers.append(Linear(model, norm, KINKS))
        if crown.installed():
            self.certifiers.append(crown.Crown(model, norm))

    def analyse(self, images_BCHW: Tensor, labels_B: Tensor) -> BestAnalysis:
        """Analyse images (B, C, H, W) in [0,1] with labels (B,) of the model's classes."""
        return BestAnalysis(self.certifiers, *batch_given(images_BCHW, labels_B))
