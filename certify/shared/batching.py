"""Batches of which a method analyses only the correctly classified images, a few at a time.

Letters: B images of the batch, I some of the correct ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from certify.shared.ball import Ball
from certify.shared.certificate import (
    FIRST_RADIUS,
    Breakdown,
    Certificate,
    Clean,
    Explained,
    guess_of,
    in_search,
    per_image,
)


@dataclass(frozen=True)
class CorrectImages:
    """The analysis of a whole batch, made of the analyses of its parts: (index_I, analysis of those images)."""

    clean: Clean
    ball: Ball
    parts: Sequence[tuple[Tensor, Explained]]

    @property
    def failure(self) -> float:
        return max((analysis.failure for _, analysis in self.parts), default=0.0)

    def at(self, eps: float | Tensor) -> Certificate:
        return self._answered(eps, lambda analysis, eps_I: analysis.at(eps_I))

    def in_search(self, eps: float | Tensor) -> Certificate:
        return self._answered(eps, in_search)

    def _answered(self, eps: float | Tensor, answer: Callable[[Explained, Tensor], Certificate]) -> Certificate:
        eps_B = per_image(eps, self.clean)
        none_B = torch.zeros_like(self.clean.correct_B)
        whole = Certificate(
            eps_B=eps_B.clone(),
            margin_B=self.clean.margin_BJ.amin(-1),
            loss_B=torch.full_like(eps_B, torch.inf),
            correct_B=self.clean.correct_B.clone(),
            certified_B=none_B,
            unknown_B=none_B.clone(),
        )
        for index_I, analysis in self.parts:
            part = answer(analysis, eps_B[index_I])
            for field in fields(Certificate):
                getattr(whole, field.name)[index_I] = getattr(part, field.name)
        return whole

    def guess(self) -> Tensor:
        guess_B = self.ball.eps_within(torch.full_like(self.clean.margin_BJ[:, 0], FIRST_RADIUS))
        for index_I, analysis in self.parts:
            guess_B[index_I] = guess_of(analysis)
        return guess_B

    def breakdown(self, eps: float | Tensor) -> Breakdown:
        """Return the breakdown of the correct images, NaN for the others; an empty one if no image is correct."""
        eps_B = per_image(eps, self.clean)
        quantity, costs = "share", dict[str, Tensor]()
        for index_I, analysis in self.parts:
            part = analysis.breakdown(eps_B[index_I])
            quantity = part.quantity
            for name, cost_I in part.costs.items():
                costs.setdefault(name, torch.full_like(eps_B, torch.nan))[index_I] = cost_I
        return Breakdown(quantity, costs)


def analyse_correct(clean: Clean, ball: Ball, few: int, analyse: Callable[[Tensor], Explained]) -> CorrectImages:
    """Call `analyse(index_I)` for the correctly classified images, at most `few` at a time."""
    index = clean.correct_B.nonzero().flatten()
    return CorrectImages(clean, ball, [(index_I, analyse(index_I)) for index_I in index.split(few) if len(index_I)])
