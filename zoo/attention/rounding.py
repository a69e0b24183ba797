"""The rounding of softmax attention, from that of its queries, keys and values (rows.py):

    o_i = sum_j P~_ij v_j,     P~ = mix(P),     P_i = softmax_j( s (q_i . k_j - kappa |k_j|^2 / 2) + bias_ij )

Scores are off by tau, so that P is within the factors exp(2 tau) (1 + gamma) of the exact one, entry by entry, and

    |o^ - o| <= |P~ (v^ - v)| + omega P~ |v^|,     omega = exp(2 tau) (1 + gamma_{3N+100} + ...) - 1.

P~ has rows that sum to 1 and columns that sum to c: ||P~||^2 <= c, and c grows by exp(2 sigma) at most where scores
move by sigma. Proof: docs/proofs.md#rounding.

Letters: B images, W windows of an image, N tokens, D width, H heads, O width of a row of values.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.arithmetic import OUT
from zoo.attention.qkv import PLAIN, Mixing, MixingError, split_of
from zoo.attention.rows import Rows
from zoo.attention.theory.core import QKVRadii, Score
from zoo.bounds.contracts import Precision, Rounded, Rounding
from zoo.bounds.facts import NoRule
from zoo.bounds.primitives import linear_rounding
from zoo.bounds.rounding import NO_BOUND, TINY, composed, exact, in_range, longest, size


def plain_rounding(module: nn.Module, precision: Precision) -> Rounding:
    """Of a variant by itself: tokens (B, N, D)."""
    return attention_rounding(module, PLAIN, precision)


def attention_rounding(content: nn.Module, mixing: Mixing, precision: Precision) -> Rounding:
    """With something around its softmax: tokens (B, N, D), all images under the same bias and mixing."""
    inner = [exact(lambda x: x.unsqueeze(1)), in_windows(content, mixing, precision), exact(lambda y: y.squeeze(1))]
    return composed(inner)


def in_windows(content: nn.Module, mixing: Mixing, precision: Precision) -> Rounding:
    """The same of the windows of every image: (B, W, N, D)."""
    split = split_of(content)
    if split.rounded is None or mixing.rounding is None:
        raise NoRule(content, NO_BOUND)
    rows, own = split.rounded(precision), mixing.rounding

    def around(x_BWND: Tensor) -> Rounded:
        return Core.of(split.score, mixing, own(precision, x_BWND.shape[2]), rows(x_BWND), precision).rounded()

    return composed([around, exact(_merged), linear_rounding(split.proj, precision)])


def _merged(o_BWHNO: Tensor) -> Tensor:
    return o_BWHNO.transpose(2, 3).flatten(3)


@dataclass(frozen=True)
class Core:
    """Around one batch, bounds in r and e. moduli: | P~ |v| |; norm: of P~; of_p: | P |v| |; off_*: as the first two,
    of the constants of `own`; long: the longest clean rows; all (B,)."""

    score: Score
    rows: Rows
    own: MixingError
    precision: Precision
    o: Tensor
    moduli: Tensor
    norm: Tensor
    of_p: Tensor
    off_moduli: Tensor
    off_norm: Tensor
    long: QKVRadii

    @staticmethod
    def of(score: Score, mixing: Mixing, own: MixingError, rows: Rows, precision: Precision) -> "Core":
        q, k, v = (one.y for one in rows)
        images, windows = q.shape[:2]
        s = score.s * (q @ k.mT - score.kappa / 2 * k.square().sum(-1).unsqueeze(-2))
        p = (s.flatten(0, 1) + mixing.bias(images * windows)).softmax(-1)
        matrices = mixing.mix(p), p, own.constants + torch.zeros_like(p)
        mixed, p, off = (each.unflatten(0, (images, windows)) for each in matrices)
        long = QKVRadii(longest(q), longest(k), longest(v))
        moduli, of_p, off_moduli = (size(each @ v.abs()) for each in (mixed, p, off))
        return Core(score, rows, own, precision, mixed @ v, moduli, _norm(mixed), of_p, off_moduli, _norm(off), long)

    def rounded(self) -> Rounded:
        return Rounded(self.o, self.radius, self.error)

    def sigma(self, r: Tensor) -> Tensor:
        """How far a score moves."""
        r_q, r_k = self.rows.q.radius(r), self.rows.k.radius(r)
        distance = self.score.kappa * (self.long.k * r_k + r_k.square() / 2)
        return abs(self.score.s) * (self.long.q * r_k + self.long.k * r_q + r_q * r_k + distance)

    def tau(self, r: Tensor, e: Tensor) -> Tensor:
        """How far a computed score is off; infinite beyond the range of float32."""
        (rows_q, rows_k, _), kappa, own = self.rows, self.score.kappa, self.precision
        long_q, long_k = self.long.q + rows_q.radius(r), self.long.k + rows_k.radius(r)
        e_q, e_k = rows_q.row_error(r, e), rows_k.row_error(r, e)
        all_q, all_k = long_q + e_q, long_k + e_k
        moduli = all_q * all_k + kappa * all_k.square()
        share = own.gamma(self.rows.q.y.shape[-1] + 10) + 4 * own.u
        off = e_q * long_k + all_q * e_k + kappa * (long_k + e_k) * e_k + share * moduli
        scores = abs(self.score.s) * off + 4 * own.u * self.own.bias + TINY
        return in_range((1 + abs(self.score.s)) * moduli + self.own.bias, scores)

    def spread(self, norm: Tensor, r: Tensor) -> Tensor:
        """||P~'|| anywhere in the ball; rows sum to 1."""
        most = math.sqrt(self.o.shape[-2])
        return torch.fmin(norm * self.sigma(r).exp(), torch.full_like(norm, most))

    def radius(self, r: Tensor) -> Tensor:
        """P~' v' - P~ v = P~' (v' - v) + (P~' - P~) v, and rows of o are never longer than those of v."""
        r_v, v = self.rows.v.radius(r), self.rows.v.y
        near = self.spread(self.norm, r) * r_v + torch.expm1(2 * self.sigma(r)) * self.moduli
        return torch.fmin(near, math.sqrt(v[0, ..., 0].numel()) * (2 * self.long.v + r_v))

    def error(self, r: Tensor, e: Tensor) -> Tensor:
        """|P~' (v^ - v')| + omega P~' |v^|; by `skew`, what is relative to the differences in exponents, of which P
        makes no more than its entropy; and what is mixed besides."""
        r_v, e_v, v = self.rows.v.radius(r), self.rows.v.error(r, e), self.rows.v.y
        skew = self.precision.gamma(math.ceil(math.log(self.o.shape[-2])))
        omega, spread, turned = self.omega(r, e) + skew, self.spread(self.norm, r), torch.exp(2 * self.sigma(r))
        rows_B = math.sqrt(v[0, ..., 0].numel()) * (self.long.v + r_v + e_v)
        moduli = torch.fmin(turned * self.moduli + spread * (r_v + e_v), rows_B)
        apart = self.own.delta * torch.fmin(turned * self.of_p + math.sqrt(self.o.shape[-2]) * (r_v + e_v), rows_B)
        apart = apart + self.off_moduli + self.off_norm * (r_v + e_v)
        own = omega * moduli + (1 + omega) * (skew * rows_B + apart)
        return in_range(size(v) + r_v + e_v, (spread * e_v + own) * OUT + TINY)

    def omega(self, r: Tensor, e: Tensor) -> Tensor:
        """By how much of itself an entry of P is off, and its products with the values."""
        gamma, u, tokens = self.precision.gamma, self.precision.u, self.o.shape[-2]
        twice = 2 * self.tau(r, e)
        softmax = torch.expm1(twice) + torch.exp(twice) * (gamma(3 * tokens + 100) + 4 * u)
        return softmax + (1 + softmax) * (gamma(tokens + 8) + self.own.roundings * u)


def _norm(p_BWHNN: Tensor) -> Tensor:
    """The largest norm of a matrix without signs: at most the root of its largest row and column sums. (B,)"""
    return (p_BWHNN.sum(-2).flatten(1).amax(1) * p_BWHNN.sum(-1).flatten(1).amax(1)).sqrt()
