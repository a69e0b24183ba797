"""Only correctly classified images are worth a bound: a method looks at those, and the others are answered here.

Letters: B images of the batch, I the correct ones among them.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from certify.certificate import Breakdown, Certificate, Clean, Explained, per_image


@dataclass(frozen=True)
class OfCorrect:
    """An analysis of the whole batch; `inner` is that of images index_I, None where there are none."""

    clean: Clean
    index_I: Tensor
    inner: Explained | None

    @property
    def failure(self) -> float:
        return self.inner.failure if self.inner else 0.0

    def at(self, eps: float | Tensor) -> Certificate:
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
        if self.inner:
            part = self.inner.at(eps_B[self.index_I])
            for field in fields(Certificate):
                getattr(whole, field.name)[self.index_I] = getattr(part, field.name)
        return whole

    def breakdown(self, eps: float | Tensor) -> Breakdown:
        """That of the correct images; not a number for the others. Nothing if there are none."""
        eps_B = per_image(eps, self.clean)
        part = self.inner.breakdown(eps_B[self.index_I]) if self.inner else Breakdown("share", {})
        costs = {name: torch.full_like(eps_B, torch.nan) for name in part.costs}
        for name, cost_I in part.costs.items():
            costs[name][self.index_I] = cost_I
        return Breakdown(part.quantity, costs)


def of_correct(clean: Clean, analyse: Callable[[Tensor], Explained]) -> OfCorrect:
    """`analyse(index_I)` of the images that are classified correctly."""
    index_I = clean.correct_B.nonzero().flatten()
    return OfCorrect(clean, index_I, analyse(index_I) if len(index_I) else None)
