"""The core where q, k and v change independently of each other, by at most r_q, r_k and r_v: any attention.

All heads together share the three radii, ||eta^q||_F <= r_q and so on: maxima over heads replace the single head of
docs/proofs.md#softmax-path. Bounds are superhomogeneous: of degree 1 for first order and beta, of degree 2 for the
remainder. For this reason ||P' - P|| has no cap, and there is no minimum with a bound that grows linearly.

Letters: as in core.py.
"""

import math
from functools import cached_property

import torch
from torch import Tensor

from zoo.arithmetic import nan_to_inf
from zoo.attention.theory.core import Core, QKVRadii, Score, SeminormBound
from zoo.attention.theory.softmax_row import ROUND, norm_upper
from zoo.spectral import sigma_upper


class SeparateCore(Core):
    """Final; see `Core`. Proof: docs/proofs.md#separate-core."""

    together = True

    def __init__(self, score: Score, q: Tensor, k: Tensor, v: Tensor, p: Tensor, mixed: Tensor, gain_H: Tensor) -> None:
        super().__init__(score, q, k, v, p, mixed, gain_H)
        self.norm_v_max = gain_H.max()
        self.half = score.kappa * self.s / 2
        self.values_B1 = norm_upper(self.values).amax(-1, keepdim=True)
        self.beta_BHNNO = self.s * (q.unsqueeze(-2) - score.kappa * k.unsqueeze(-3))
        self.length_BHNN = self.beta_BHNNO.norm(dim=-1)
        self._matrix()
        self._tau()

    # seminorms --------------------------------------------------------------------------------------------------------

    def _matrix(self) -> None:
        """Bound ||S' - S||_F and its rows.

        The weights are constant, and k is taken less its mean, as constants of rows of S have no effect.
        """
        keys_BH1, across = self.s * norm_upper(self.keys).unsqueeze(-1), self._columns(torch.ones_like(self.p))
        s, half_rows = across.new_tensor(self.s), self.half * math.sqrt(self.p.shape[-1])
        self.matrix = SeminormBound(keys_BH1.amax(-2), across.unsqueeze(-1), s, half_rows)
        self.row = SeminormBound(keys_BH1, self.length_BHNN.amax(-1), s, self.half)

    def _tau(self) -> None:
        """Bound tau by its seminorms.

        With c = e_k - p,

            mean-free part of beta:  (sum_j c_j^2 |beta_ij|^2)^(1/2),    of Q:  s |c|,  kappa s / 2 (1 - p_k)

        Proof: docs/proofs.md#score-change.
        """
        length2, p2 = self.length_BHNN.square(), self.p.square()
        cross = (length2 * (1 - 2 * self.p) + (p2 * length2).sum(-1, keepdim=True)).clamp_min(0).sqrt()
        apart = (1 - 2 * self.p + p2.sum(-1, keepdim=True)).clamp_min(0).sqrt()
        keys = self.softmax.centred(self.keys).norm(dim=-1)
        parts = ((self.s, keys), (1.0, cross), (self.s, apart), (self.half, 1 - self.p))
        self.tau = SeminormBound(*(factor * ROUND * z.amax((-3, -2, -1)) for factor, z in parts))
        root = self.softmax.max_BHN.sqrt() * ROUND
        cross = (self.p.sqrt() * self.length_BHNN).amax(-1) * ROUND
        self.deviation = SeminormBound(self.own_BHN, cross, self.s * root, self.half * root)

    def _columns(self, w: Tensor) -> Tensor:
        """Return sqrt max_lk lambda_max(sum_i w_ilk beta_ilk beta_ilk^T): (..., B, H, N, N) -> (..., B)."""
        return norm_upper((w.sqrt().unsqueeze(-1) * self.beta_BHNNO).transpose(-3, -2)).amax((-2, -1))

    def _moments(self, wp: Tensor) -> tuple[Tensor, Tensor]:
        """Return T_q, T_k of the weights wp: |Q| <= s |eta_i| |eta_k|, kappa s / 2 |eta_k|^2, variances by moments."""
        return self.s * wp.amax((-3, -2, -1)).sqrt(), self.half * wp.sum(-2).amax((-2, -1)).sqrt()

    def row_seminorm(self, w: Tensor) -> SeminormBound:
        wp = w.unsqueeze(-1) * self.p
        return SeminormBound((w.sqrt() * self.own_BHN).amax((-2, -1)), self._columns(wp), *self._moments(wp))

    def entry_seminorms(self, z: Tensor) -> tuple[SeminormBound, SeminormBound]:
        w, most = self.p * z, z.amax(-1)
        mean = w.sum(-1, keepdim=True)
        own = self.s * norm_upper(w.sqrt().unsqueeze(-1) * self.softmax.centred(self.keys))
        cross = self._columns(w) + self._columns(mean * self.p)
        whole = SeminormBound(own.amax((-2, -1)), cross, *self._moments(most.unsqueeze(-1) * self.p))
        length2, root = self.length_BHNN.square(), (most * self.softmax.max_BHN).sqrt()
        cross = (w * length2).amax(-1).sqrt() + (mean * self.p * length2).amax(-1).sqrt()
        return whole, SeminormBound(own, cross, self.s * root, self.half * root)

    def quadratic(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Bound -<G, Q> <= s max_l ||G_l|| r_q r_k + kappa s / 2 max (1^T G)^+ r_k^2.

        Where q and k are one,

            -<G, Q> = s / 2 sum eta^T (diag(1^T G) - G - G^T) eta    for kappa = 1:  the largest eigenvalue.
        """
        sums = g.sum(-2)
        if not self.score.tied:
            keys = self.half * sums.amax((-2, -1)).clamp_min(0) * ROUND
            return self.s * norm_upper(g).amax(-1), keys
        form = sums.diag_embed() * self.score.kappa - g - g.mT
        size = torch.linalg.matrix_norm(form)
        largest = (torch.linalg.eigvalsh(form)[..., -1] + 1e-12 * size).amax(-1).clamp_min(0)
        return torch.zeros_like(largest), self.s / 2 * largest

    # values and outputs -----------------------------------------------------------------------------------------------

    def combined(self, p_BG: Tensor, inputs_BG: Tensor) -> Tensor:
        """Bound ||(P' - P) V|| <= max ||V_l|| ||P' - P||, all heads together."""
        return (p_BG * self.values_B1 + inputs_BG * self.norm_v_max).squeeze(-1)

    def value_gradients(self, o: Tensor) -> tuple[Tensor, Tensor]:
        o = self.gain_H[:, None, None] * o
        return norm_upper(o).amax(-1, keepdim=True), o

    # first order ------------------------------------------------------------------------------------------------------

    @cached_property
    def gains(self) -> QKVRadii:
        """||J|| with respect to q, k and v alone (B,)."""
        one = torch.ones_like(self.values_B1[:, 0])
        zero = torch.zeros_like(one)
        by_q, by_k = super().linear(QKVRadii(one, zero, zero)), super().linear(QKVRadii(zero, one, zero))
        return QKVRadii(by_q, by_k, sigma_upper(self.mixed).amax(-1))

    def linear(self, r: QKVRadii) -> Tensor:
        """Add the moves by queries and by keys, each by its tighter bound."""
        return self.gains.q * r.q + self.gains.k * r.k

    def radius(self, r: QKVRadii) -> Tensor:
        """Bound P' V' - P V = P (V' - V) + (P' - P) V'."""
        return nan_to_inf(self.gains.v * r.v + self.moved(r))
