"""The union of methods: certified by one is certified. All speak of the same baked function, eps and set of inputs."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cached_property

import torch
from torch import Tensor, nn

from certify.adjoint import Adjoint
from certify.certificate import Analysis, Breakdown, Certificate, Certifier, Clean, Explained
from certify.lofast import LoFAST
from zoo.rules import NoRule


class BestAnalysis:
    """Cheap methods first; a dearer one looks at the batch only when an eps leaves an image of it open."""

    def __init__(self, analyses: Sequence[Callable[[], Analysis]]) -> None:
        self._makers = list(analyses)
        self._made: list[Analysis] = [self._makers[0]()]

    @property
    def clean(self) -> Clean:
        return self._made[0].clean

    def at(self, eps: float | Tensor) -> Certificate:
        best = self._made[0].at(eps)
        for k in range(1, len(self._makers)):
            if bool((best.certified_B | ~best.correct_B).all()):
                break
            if k == len(self._made):
                self._made.append(self._makers[k]())
            best = _better(best, self._made[k].at(eps))
        return best

    def breakdown(self, eps: float | Tensor) -> Breakdown:
        """That of the last method, which is the tightest."""
        self._made += [make() for make in self._makers[len(self._made) :]]
        last = self._made[-1]
        assert isinstance(last, Explained)
        return last.breakdown(eps)


def _better(one: Certificate, other: Certificate) -> Certificate:
    """Image by image the certificate that leaves more of its margin."""
    other_B = other.margin_B - other.loss_B > one.margin_B - one.loss_B
    chosen = {f.name: torch.where(other_B, getattr(other, f.name), getattr(one, f.name)) for f in fields(Certificate)}
    return Certificate(**chosen | {"certified_B": one.certified_B | other.certified_B})


class Best:
    """LoFAST, then the adjoint certificate where the model has its rules. Raises NoRule where LoFAST has none."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.first = LoFAST(model)
        self.baked = self.first.baked

    @cached_property
    def second(self) -> Certifier | None:
        try:
            return Adjoint(self.model)
        except NoRule:
            return None

    def analyse(self, images_BCHW: Tensor, labels_B: Tensor) -> BestAnalysis:
        """images (B, C, H, W) in [0,1], labels (B,) of the model's classes."""
        certifiers = [self.first, *([self.second] if self.second else [])]
        return BestAnalysis([lambda c=c: c.analyse(images_BCHW, labels_B) for c in certifiers])  # type: ignore[misc]
