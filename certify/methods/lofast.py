"""LoFAST certificates: the radius of the perturbation is passed on from layer to layer (docs/references.md#lofast,
Theorem 1).

Letters: B images, J classes; y the label, m_j = logit_y - logit_j, W = (w_j) the head, e the radius before the head.

    ||x' - x||_2 <= eps  =>  ||h(x') - h(x)||_2 <= e(eps)  =>  m_j(x') >= m_j(x) - ||w_y - w_j||_2 e(eps)

The last step compares classes in pairs (docs/references.md#erratum-lofast-pairs); it is never worse than the paper's
sqrt(2) ||W|| e.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from certify.methods.bake import model_of
from certify.methods.breakdown import growth, names
from certify.methods.certificate import (
    Breakdown,
    Certificate,
    Clean,
    checked,
    decide,
    pair_weights,
    per_image,
    same_function,
)
from certify.methods.correct import OfCorrect, of_correct
from zoo.arithmetic import nan_to_inf, product
from zoo.bounds.contracts import Bound
from zoo.bounds.rules import classifier_of, radii, steps_of


@dataclass(frozen=True)
class LoFASTAnalysis:
    """The stored terms of a batch."""

    clean: Clean
    weight_BJ: Tensor  # ||w_y - w_j||
    radius: Bound  # eps -> e(eps)
    steps: Sequence[tuple[str, Bound]]  # what it is the composition of
    failure: float = 0.0

    def at(self, eps: float | Tensor) -> Certificate:
        eps_B = per_image(eps, self.clean)
        e_B = nan_to_inf(self.radius(eps_B))
        return decide(self.clean, product(self.weight_BJ, e_B[:, None]), eps_B)

    def breakdown(self, eps: float | Tensor) -> Breakdown:
        """The growth of the radius in every step."""
        steps, bounds = zip(*self.steps, strict=True)
        return growth(steps, radii(bounds, per_image(eps, self.clean)))


class LoFAST:
    """The certifier of one model: weights are measured once, here; images by `analyse`; eps by `LoFASTAnalysis.at`.

    Raises NoRule for a model with a module that has no rule.
    """

    local = False  # the published rules

    def __init__(self, model: nn.Module) -> None:
        self.model = model_of(model)
        self.baked = self.model.exact
        trunk, self.head = classifier_of(self.baked, local=self.local)
        self.steps = steps_of(trunk)
        self.names = names(self.baked, self.steps)

    @torch.no_grad()
    def analyse(self, images_BCHW: Tensor, labels_B: Tensor) -> OfCorrect:
        """images (B, C, H, W) in [0,1], labels (B,) of the model's classes."""
        images, labels = checked(images_BCHW, labels_B, self.head)
        clean = self.model.answers(images, labels)
        return of_correct(clean, len(images) or 1, lambda index_I: self._bounds(images[index_I], clean[index_I]))

    def _bounds(self, x: Tensor, clean: Clean) -> LoFASTAnalysis:
        bounds = []
        for step in self.steps:
            x, bound = step(x)
            bounds.append(bound)
        same_function(self.head(x), clean)
        weight_BJ = pair_weights(self.head, clean.label_B)
        steps = list(zip(self.names, bounds, strict=True))
        return LoFASTAnalysis(clean, weight_BJ, lambda r: radii(bounds, r)[-1], steps)


class LocalLoFAST(LoFAST):
    """The same with local rules: attention with the softmax where it is."""

    local = True
