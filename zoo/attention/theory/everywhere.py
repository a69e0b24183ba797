"""Quadratic forms of the core's remainder that hold for every change eta, however far scores move.

delta^1 moves the scores first, Q the rest of the way; a softmax moves by half as much as its scores, and by sqrt(2) at
most. Products of lengths become sums of squares by 2 x y <= x^2 + y^2 and min(D, x) <= (D x)^(1/2). These forms are
loose, but grow only quadratically. Far out they are less than exponentials or curvature on a wide box. Proof:
docs/proofs.md#attention-forms-everywhere.

Letters: as in core.py.
"""

import torch
from torch import Tensor

from zoo.attention.theory.core import Core
from zoo.attention.theory.score_range import ScoreRange, ratio
from zoo.attention.theory.softmax_row import K2_MAX, ROUND, norm_upper
from zoo.attention.theory.squares import QKV, Scores, ScoreSquares, Squares, TokenSquares, ValueSquares

HALF_STEP = 2**-0.25 * ROUND  # min(sqrt(2), x / 2) <= this times sqrt(x)


def rest_everywhere(scores: Scores, reach: ScoreRange) -> list[Squares]:
    """Bound |R|^2; the reach chooses a weight.

    Row by row it is 3 times the sum of three squares: the effect of delta^1 on P' V less its linear part, the effect of
    Q on P' V, and (P' - P) eta^v.
    """
    core, along = scores.core, moved_everywhere(scores.core, reach)
    size = norm_upper(core.values).unsqueeze(-1)
    by_q = 3 / 2 * (HALF_STEP**2 * core.s) * size.square().expand(core.nu_BHN.shape)
    by_k = by_q * (1 + core.score.kappa / 2) ** 2 * core.p.shape[-1]
    values = 6 * ROUND * core.gain_H.square().view(-1, 1, 1).expand(core.p.shape)
    return [
        ScoreSquares(scores, 3 * ROUND * along),
        TokenSquares(QKV(by_q, by_k, torch.zeros_like(by_q))),
        ValueSquares(core, values),
    ]


def moved_everywhere(core: Core, reach: ScoreRange) -> Tensor:
    """Return a with (x + y)^2 <= sum_k a_k delta^1~_k^2 in each row.

    Here x = ||V|| |delta^1~| / 2 and y = nu sd(delta^1): (1 + w) x^2 + (1 + 1 / w) y^2 for every w > 0.
    """
    half, nu2 = norm_upper(core.values).unsqueeze(-1) / 2, core.nu_BHN.square()
    linear2 = reach.linear.square()
    w = ratio((nu2 * (core.p * linear2).sum(-1)).sqrt(), half * linear2.sum(-1).sqrt()).unsqueeze(-1)
    return (1 + w) * half.square().unsqueeze(-1) + (1 + 1 / w) * nu2.unsqueeze(-1) * core.p


def gradient_everywhere(scores: Scores, o: Tensor, reach: ScoreRange) -> list[Squares]:
    """Bound -<o, R> for gradients o (C, B, H, N, O); the reach chooses a weight."""
    core, kappa = scores.core, scores.core.score.kappa
    c = core.directional(o)
    c = (c - c.mean(-1, keepdim=True)).norm(dim=-1) * ROUND
    o = (core.gain_H[:, None, None] * o).norm(dim=-1) * ROUND
    m = ratio(reach.tokens.v.norm(dim=-1, keepdim=True), reach.linear.norm(dim=(-2, -1)).unsqueeze(-1))
    along = K2_MAX / 2 * c + m / 4 * o
    total, length = o.sum(-1, keepdim=True), o.norm(dim=-1, keepdim=True)
    step = HALF_STEP * core.s**0.5 / 4
    more = 1 + kappa / 2
    by_q = core.s / 4 * c.norm(dim=-1, keepdim=True) + step * length
    by_k = core.s / 4 * (c.norm(dim=-1, keepdim=True) + kappa * c.sum(-1, keepdim=True)) + step * more * total
    by_v = total / (4 * m) + step * (length + more * total)
    return [
        ScoreSquares(scores, along.unsqueeze(-1).expand(c.shape + c.shape[-1:])),
        TokenSquares(QKV(*(d.expand(c.shape) for d in (by_q, by_k, by_v)))),
    ]
