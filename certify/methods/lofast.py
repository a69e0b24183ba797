"""LoFAST certificates: the radius of the perturbation is propagated from layer to layer.

(docs/references.md#lofast, Theorem 1)

Letters: B images, J classes; y the label, m_j = logit_y - logit_j, W = (w_j) the head, e the radius before the head.

    ||x' - x||_2 <= r  =>  ||h(x') - h(x)||_2 <= e(r)  =>  m_j(x') >= m_j(x) - ||w_y - w_j||_2 e(r)

with r the radius of the L2 ball around the ball of eps (certify/shared/ball.py).

The last step compares classes in pairs (docs/references.md#erratum-lofast-pairs); it is never worse than the paper's
sqrt(2) ||W|| e.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from certify.shared.bake import SERVED, Model, model_of
from certify.shared.ball import L2, Ball, known
from certify.shared.batching import CorrectImages, analyse_correct
from certify.shared.breakdown import growth, names
from certify.shared.certificate import (
    Breakdown,
    Certificate,
    Clean,
    checked,
    decide,
    lowered,
    pair_weights,
    per_image,
)
from zoo.arithmetic import nan_to_inf, product
from zoo.bounds import float_error
from zoo.bounds.contracts import Bound, Layer
from zoo.bounds.first_order import layer_of, radii, steps_of, trunk
from zoo.bounds.rule_table import Link, together


@dataclass(frozen=True)
class LoFASTAnalysis:
    """The stored terms of a batch."""

    clean: Clean
    ball: Ball
    weight_BJ: Tensor  # ||w_y - w_j||
    radius: Bound  # r -> e(r), in L2
    steps: Sequence[tuple[str, Bound]]  # name and bound of the steps that `radius` composes
    failure: float = 0.0

    def at(self, eps: float | Tensor) -> Certificate:
        eps_B = per_image(eps, self.clean)
        e_B = nan_to_inf(self.radius(self.ball.radius(eps_B)))
        return decide(self.clean, product(self.weight_BJ, e_B[:, None]), eps_B)

    def breakdown(self, eps: float | Tensor) -> Breakdown:
        """Return the growth of the radius in every step."""
        steps, bounds = zip(*self.steps, strict=True)
        return growth(steps, radii(bounds, self.ball.radius(per_image(eps, self.clean))))


def with_defect(bound: Bound, defect_B: Tensor) -> Bound:
    """Return the bound around a point with an error of `defect_B`."""
    return lambda r: bound(r) + defect_B


class LoFAST:
    """The certifier of one model: weights are measured once, here; images by `analyse`; eps by `LoFASTAnalysis.at`.

    Raises NoRule for a model with a module that has no rule.
    """

    local = False  # the published rules
    types: Collection[torch.dtype] = SERVED

    def __init__(self, model: nn.Module | Model, norm: str = L2) -> None:
        self.norm = known(norm)
        self.model = model_of(model, self.types)
        self.baked = self.model.exact
        self.links, self.head = trunk(self.baked)
        layers = together(self.layers, self.links)
        self.steps = [step for steps in layers for step in steps]
        self.ends = list(accumulate(map(len, layers)))  # where each link ends, counted in steps
        self.names = names(self.baked, self.steps)

    def layers(self, link: nn.Module | Link) -> Sequence[Layer]:
        """Return the steps of one link."""
        return steps_of(layer_of(link, local=self.local))

    @torch.no_grad()
    def analyse(self, images_BCHW: Tensor, labels_B: Tensor) -> CorrectImages:
        """Analyse images (B, C, H, W) in [0,1] with labels (B,) of the model's classes."""
        images, labels = checked(images_BCHW, labels_B, self.head)
        clean = self.model.answers(images, labels)
        ball = Ball(self.norm, images[0].numel())
        return analyse_correct(
            clean, ball, len(images), lambda index_I: self.bounds(images[index_I], clean[index_I], ball)
        )

    def bounds(self, x: Tensor, clean: Clean, ball: Ball) -> LoFASTAnalysis:
        """Return the terms of these images, all of them correct."""
        points, bounds = [x], list[Bound]()
        for step in self.steps:
            x, bound = step(x)
            points.append(x)
            bounds.append(bound)
        defects = float_error.defects(self.links, self.ends, points)
        bounds = [with_defect(bound, defect_B) for bound, defect_B in zip(bounds, defects, strict=True)]
        clean = lowered(self.head, x, clean)
        weight_BJ = pair_weights(self.head, clean.label_B)
        steps = list(zip(self.names, bounds, strict=True))
        return LoFASTAnalysis(clean, ball, weight_BJ, lambda r: radii(bounds, r)[-1], steps)


class LocalLoFAST(LoFAST):
    """LoFAST with local rules: attention is bounded around its softmax weights at the image."""

    local = True
