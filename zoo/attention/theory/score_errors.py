"""The cost of rounding errors in queries, keys, values and probabilities at the clean point.

core.py and forms.py bound the core that has the computed q, k, v and P. The exact core moves differently, by X(eta) at
a change eta of q, k and v. With scores that are off by at most d, up to a constant of each row, eps = sqrt(N) d, errors
e_q, e_k, e_v, and eps1 = s (e_k . eta^q + e_q . eta^k - kappa e_k . eta^k), the effect of these on a change of the
scores,

    |X_il| <= (eps V + |e_v|) (min(2.5, |delta_il|) + |eps1_il|) + V |eps1_il|
              + (4 eps + min(|eps1_il|, 6) / 2) |eta^v_l|

where V bounds the norm of the exact values of a head, less their mean. A gain above 1 multiplies all of it.

Proof: docs/proofs.md#scores.

Letters: as in core.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.arithmetic import nan_to_inf, product
from zoo.attention.theory.core import Core, QKVRadii
from zoo.attention.theory.score_range import ScoreRange
from zoo.attention.theory.softmax_row import ROUND, norm_upper
from zoo.attention.theory.squares import QKV, Scores, TokenSquares, at_tokens

SHARE = 1e-6  # by which the square of the remainder grows to make room for that of X
FLOOR = 1e-3  # the least factor by which a form shrinks: X does not
FAR = 6.0  # min(|eps1|, FAR) / 2 is enough, as rows of a softmax move by sqrt(2) at most
ROOT2 = 2.56  # min(2.5, x)^2 <= ROOT2 x
LEAST = 1e-100


@dataclass(frozen=True)
class Errors:
    """Upper bounds (B,) of the errors of scores, q, k and v.

    `scores` is how far the scores of a row are off, up to a constant of the row, softmax and mixing included. The
    others are Frobenius norms.
    """

    scores: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


class Inexact:
    """X of one core; v (B, H, N, O) are its values as they were computed, without gain."""

    def __init__(self, core: Core, v: Tensor, errors: Errors) -> None:
        self.core, self.errors = core, errors
        self.tokens, self.gain = core.p.shape[-1], core.gain_H.abs().amax().clamp_min(1)
        self.values_B = norm_upper(v - v.mean(-2, keepdim=True)).amax(-1) + errors.v
        self.eps_B = self.tokens**0.5 * errors.scores
        self.all_B = self.eps_B * self.values_B + errors.v
        self.on_k_B = self.errors.q + core.score.kappa * self.errors.k  # eps1 by eta^k

    def norm(self, r: QKVRadii, qkv: QKVRadii) -> Tensor:
        """Return |X|_F (..., B), before the map that follows the heads.

        r are the radii as the core takes them, qkv those of q, k and v.
        """
        scores = self.core.matrix.at(r.of(1)).norm(dim=-1)
        shifted = self.core.s * self.tokens**0.5 * (product(self.errors.k, qkv.q) + product(self.on_k_B, qkv.k))
        by_values = product(self.all_B, scores + shifted) + product(self.values_B, shifted)
        by_inputs = self.tokens**0.5 * product(4 * self.eps_B + shifted, qkv.v)
        return nan_to_inf((by_values + by_inputs) * self.gain) * ROUND

    def squares(self, reach: ScoreRange) -> TokenSquares:
        """Return |X|^2 for every eta whose coordinates stay within the reach; finite, see `known_B`."""
        core, tokens, s = self.core, self.tokens, self.core.s
        most, values, e_k, on_k = (_each(z) for z in (self.all_B, self.values_B, self.errors.k, self.on_k_B))
        both, more = 2 * (s * (most + values)).square(), (1 + core.score.kappa / 2) ** 2
        keys2 = (s * norm_upper(core.keys)).square().unsqueeze(-1)
        by_q = most.square() * (2 * keys2 + ROOT2 * s / 2) + both * e_k.square()
        by_k = 2 * Scores(core).lengths2().sum(-2) + ROOT2 * s / 2 * tokens * more
        by_k = most.square() * by_k + both * tokens * on_k.square()
        far = s * (e_k * reach.q.amax(-1, keepdim=True) + tokens**0.5 * on_k * reach.k.amax(-1, keepdim=True))
        by_v = tokens * (4 * _each(self.eps_B) + far.clamp_max(FAR) / 2).square()
        shape, factor = core.p.shape[:-1], 4 * ROUND * self.gain.square()
        return TokenSquares(QKV(*(factor * d.expand(shape) for d in (by_q, by_k, by_v))))

    def along(self, o: Tensor, reach: ScoreRange) -> tuple[TokenSquares, Tensor]:
        """Return F and c (C, B) with -<o, X> <= F(eta) + c for gradients o (C, B, H, N, O).

        It uses 2 |X| <= |X|^2 / z + z.
        """
        whole, length_CB = self.squares(reach), o.flatten(2).norm(dim=-1)
        z_B = at_tokens(whole.d, reach.tokens).sqrt() + LEAST
        share = (length_CB / (2 * z_B))[..., None, None]
        return TokenSquares(QKV(*(share * d for d in whole.d))), length_CB * z_B / 2

    @property
    def known_B(self) -> Tensor:
        """True where all errors have a finite bound."""
        return torch.stack([self.all_B, self.on_k_B, self.errors.k]).isfinite().all(0)


def _each(z_B: Tensor) -> Tensor:
    """Reshape (B,) -> (B, 1, 1), with 0 for unknown values."""
    return torch.where(z_B.isfinite(), z_B, 0.0).view(-1, 1, 1)
