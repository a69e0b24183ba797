"""The union of methods: certified by one is certified. All speak of the same baked function, eps and set of inputs."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields

import torch
from torch import Tensor, nn

from certify.adjoint import Adjoint
from certify.certificate import Analysis, Breakdown, Certificate, Certifier, Clean, Explained
from certify.lofast import LoFAST
from zoo.rules import NoRule


class BestAnalysis:
    """Cheap methods first; a dearer one looks at the batch only when an eps leaves an image of it open."""

    def __init__(self, certifiers: Sequence[Certifier], images_BCHW: Tensor, labels_B: Tensor) -> None:
        self._certifiers, self._batch = certifiers, (images_BCHW, labels_B)
        self._made: list[Analysis] = []

    @property
    def clean(self) -> Clean:
        return self._analysis(0).clean

    def at(self, eps: float | Tensor) -> Certificate:
        best = self._analysis(0).at(eps)
        for k in range(1, len(self._certifiers)):
            if bool((best.certified_B | ~best.correct_B).all()):
                break
            best = _better(best, self._analysis(k).at(eps))
        return best

    def breakdown(self, eps: float | Tensor) -> Breakdown:
        """That of the last method, which is the tightest."""
        last = self._analysis(len(self._certifiers) - 1)
        assert isinstance(last, Explained)
        return last.breakdown(eps)

    def _analysis(self, k: int) -> Analysis:
        """That of method k, made with those in front of it when it is first asked for."""
        while len(self._made) <= k:
            self._made.append(self._certifiers[len(self._made)].analyse(*self._batch))
        return self._made[k]


def _better(one: Certificate, other: Certificate) -> Certificate:
    """Image by image the certificate that leaves more of its margin."""
    other_B = other.margin_B - other.loss_B > one.margin_B - one.loss_B
    chosen = {f.name: torch.where(other_B, getattr(other, f.name), getattr(one, f.name)) for f in fields(Certificate)}
    return Certificate(**chosen | {"certified_B": one.certified_B | other.certified_B})


class Best:
    """LoFAST, then the adjoint certificate where the model has its rules. Raises NoRule where LoFAST has none."""

    def __init__(self, model: nn.Module) -> None:
        first = LoFAST(model)
        self.baked, self.certifiers = first.baked, list[Certifier]([first])
        with suppress(NoRule):
            self.certifiers.append(Adjoint(model))

    def analyse(self, images_BCHW: Tensor, labels_B: Tensor) -> BestAnalysis:
        """images (B, C, H, W) in [0,1], labels (B,) of the model's classes."""
        return BestAnalysis(self.certifiers, images_BCHW, labels_B)
