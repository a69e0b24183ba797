"""Errors of the queries, keys, values and probabilities that the rules of attention compute at a clean batch.

Running error analysis (zoo/bounds/float_error.py) of how they are made bounds their distance from the exact ones.
Proof: docs/proofs.md#scores.

Letters: as in theory/core.py; 3 stands for q, k, v.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from zoo.arithmetic import OUT, gamma, nan_to_inf
from zoo.attention.theory.core import Score
from zoo.attention.theory.score_errors import Errors
from zoo.bounds.float_error import LIBM, Known, RunningError

Map = Callable[[Tensor], Tensor]
UNDERFLOW = 1e-270  # smaller probabilities count as 0


def scores(score: Score, q: Tensor, k: Tensor) -> Tensor:
    """Return s (q . k - kappa |k|^2 / 2)."""
    s = q @ k.mT - score.kappa / 2 * k.square().sum(-1).unsqueeze(-2) if score.kappa else q @ k.mT
    return score.s * s


def errors_of(x: Tensor, rows: Map, score: Score, y_3: Tensor, s: Tensor, attend: Map, p: Tensor, mix: Map) -> Errors:
    """Return the errors of the values that the rules use: y_3 (3, B, H, N, O), the scores s, and p.

    `rows` makes y_3 from x, `attend` p from s, and `mix` the matrix before V from p. Centring rounds once more.
    """
    with torch.no_grad(), RunningError() as running:
        exact_3 = running.of(rows(x))
        exact_s = running.of(scores(score, *exact_3.value.unbind(0)[:2]))
        exact_p, exact_mixed = running.of(attend(s)), running.of(mix(p))
    share = _off(p, exact_p) / p.clamp_min(UNDERFLOW)
    share = torch.where(p > UNDERFLOW, share, 0.0).flatten(1).amax(1)
    logs = torch.where(share < 0.5, 2 * share, torch.inf)  # |log(1 + z)| <= 2 |z|
    of_scores, of_mixed = (z.flatten(1).amax(1) for z in (_off(s, exact_s), exact_mixed.error))
    centred = 2 * gamma(p.shape[-1] + 4) * y_3.abs() + _off(y_3, exact_3)
    total = of_scores + logs + of_mixed + 4 * LIBM
    return Errors(*(nan_to_inf(z) * OUT for z in (total, *centred.flatten(2).norm(dim=-1))))


def _off(y: Tensor, exact: Known) -> Tensor:
    return (y - exact.value).abs() + exact.error
