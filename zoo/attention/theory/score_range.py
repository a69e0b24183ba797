"""Bounds of how far the scores can go, given a reach of each entry and of each coordinate of q, k and v.

delta~ = delta^1~ + Q~ is bounded entry by entry, and from it tau, the variance and the length of each row.

Letters: as in core.py. Proofs: docs/proofs.md#attention-forms.
"""

from functools import cached_property

import torch
from torch import Tensor

from zoo.attention.theory.core import Core
from zoo.attention.theory.softmax_row import ROUND, TAU_MAX
from zoo.attention.theory.squares import QKV, TokenSquares

REACH_MAX = 1e30  # a larger reach counts as unbounded
TINY = 1e-300
WEIGHTS = (1e-6, 1e6)  # range of the free weights


def ratio(above: Tensor, below: Tensor) -> Tensor:
    """Return a free weight."""
    return ((above + TINY) / (below + TINY)).clamp(*WEIGHTS)


class ScoreRange:
    """Bounds of the scores, given the reaches of delta^1~ (B, H, N, N) and of the coordinates of eta.

    The latter are (B, 3, H, N, O).
    """

    def __init__(self, core: Core, linear: Tensor, eta: Tensor) -> None:
        q, k, v = eta.unbind(1)
        self.core, self.linear, self.v = core, linear, v
        self.q, self.k = q.norm(dim=-1) * ROUND, k.norm(dim=-1) * ROUND
        product = core.s * (q @ k.mT + core.score.kappa / 2 * self.k.square().unsqueeze(-2))
        # Q less its mean is (1 - p_k) Q_k - sum_{j != k} p_j Q_j.
        self.quadratic = (1 - 2 * core.p) * product + (core.p * product).sum(-1, keepdim=True)
        self.delta = (linear + self.quadratic) * ROUND
        self.variance = (core.p * self.delta.square()).sum(-1)
        self.sd, self.change = self.variance.sqrt(), self.delta.norm(dim=-1) * ROUND
        self.tau = self.delta.amax(-1)
        self.gentle = self.tau <= TAU_MAX  # rows where exponentials are allowed
        # Used for choices only: the coordinates of a token do not all reach as far at once as each can by itself.
        likely = q.shape[-1] ** -0.5
        self.tokens = QKV(*(likely * one for one in (self.q, self.k, v.norm(dim=-1))))
        self.bounded = eta.flatten(1).amax(1).maximum(linear.flatten(1).amax(1)) < REACH_MAX
        self.exponent, self.exponent_most = self.delta.clamp_max(TAU_MAX), self.tau.clamp_max(TAU_MAX)

    @cached_property
    def third(self) -> tuple[Tensor, Tensor]:
        """Upper bounds (B, H, N) of int (1 - t) t e^{2 t tau} dt and int (1 - t) t^2 e^{3 t tau} dt."""
        t = self.exponent_most
        return (2 * t).exp() / 6 * ROUND, (3 * t).exp() / 12 * ROUND

    def gentler(self, exponential: Tensor, box: Tensor) -> Tensor:
        """Return the rows where sum_k a_ilk delta~_ilk^2 is less at the reach with exponentials than with the box."""
        by_exponential, by_box = ((a * self.delta.square()).sum(-1) for a in (exponential, box))
        return self.gentle & (by_exponential <= by_box)

    def products(self, a: Tensor) -> TokenSquares:
        """Bound sum a_ilk Q_ilk^2 by the reach of eta^k.

        It is at most s^2 (1 + kappa) sum a_ilk reach(eta^k_lk)^2 (|eta^q_il|^2 + kappa |eta^k_lk|^2 / 4).
        """
        kappa = self.core.score.kappa
        a = self.core.s**2 * (1 + kappa) * a * self.k.square().unsqueeze(-2)
        return TokenSquares(QKV(a.sum(-1), kappa / 4 * a.sum(-2), torch.zeros_like(a[..., 0])))

    def centred(self, a: Tensor) -> Tensor:
        """Return b with sum a_k Q~_k^2 <= sum_k b_k Q_k^2.

        A multiple of p, whose sum is a variance, contributes at most the second moment, and the rest 2 (a_k + p_k sum
        a).
        """
        p = self.core.p
        even = p * (a / p.clamp_min(TINY)).amin(-1, keepdim=True)
        a = (a - even).clamp_min(0)
        return even + 2 * (a + p * a.sum(-1, keepdim=True))
