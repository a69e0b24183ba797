"""The rounding of softmax attention, from that of its queries, keys and values (rows.py).

    o_i = sum_j P~_ij v_j,     P~ = mix(P),     P_i = softmax_j( s (q_i . k_j - kappa |k_j|^2 / 2) + bias_ij )

Scores that are off by tau change a row by |Cov_P(delta, v)| <= tau (P |v|^2)^(1/2), integrated, and keep entries of P
within the factor exp(2 tau). All other errors are relative to these:

    |o^ - o| <= |P~ (v^ - v)| + tau exp(tau) (P |v^|^2)^(1/2) + omega P~ |v^|,  omega = exp(2 tau) (gamma_{3N+100} + ..)

P~ has rows that sum to 1 and columns that sum to c: ||P~||^2 <= c, and c grows by exp(2 sigma) at most where scores
move by sigma. Proof: docs/proofs.md#rounding.

Letters: B images, W windows of an image, N tokens, D width, H heads, O width of a row of values.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.arithmetic import OUT, product
from zoo.attention.softmax.qkv import PLAIN, Mixing, MixingError, split_of
from zoo.attention.softmax.rows import Rows
from zoo.attention.theory.core import QKVRadii, Score
from zoo.bounds.contracts import Precision, Rounded, Rounding
from zoo.bounds.primitives import linear_rounding
from zoo.bounds.rounding import NO_BOUND, TINY, composed, exact, in_range, longest, size
from zoo.bounds.rule_table import NoRule


def plain_rounding(module: nn.Module, precision: Precision) -> Rounding:
    """Bound a variant by itself: tokens (B, N, D)."""
    return attention_rounding(module, PLAIN, precision)


def attention_rounding(content: nn.Module, mixing: Mixing, precision: Precision) -> Rounding:
    """Bound a variant with mixing around its softmax: tokens (B, N, D), the same bias and mixing for all images."""
    inner = [exact(lambda x: x.unsqueeze(1)), in_windows(content, mixing, precision), exact(lambda y: y.squeeze(1))]
    return composed(inner)


def in_windows(content: nn.Module, mixing: Mixing, precision: Precision) -> Rounding:
    """Bound the same in the windows of every image: (B, W, N, D)."""
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
class SquareSum:
    """The sum of g^2 P_ij |v_j|^2 over all rows i, heads and windows, g the gain of a head's P in P~: (B,) each.

    `steep` times the length of a change of all scores is never below what that adds. `root_most` bounds the root of the
    sum for any P and the clean v. `norm` bounds P, and `gain` all |g|.
    """

    clean: Tensor
    steep: Tensor
    root_most: Tensor
    norm: Tensor
    gain: Tensor

    @staticmethod
    def of(p: Tensor, v: Tensor, gain_H: Tensor) -> "SquareSum":
        length2, rows = (gain_H[:, None] * torch.linalg.vector_norm(v, dim=-1)).square(), v.shape[-2]
        least, most = length2.aminmax(dim=-1)
        clean = (p.sum(-2) * length2).flatten(1).sum(1)
        steep, root_most = (rows / 8) ** 0.5 * size(most - least), (rows * most.flatten(1).sum(1)).sqrt()
        return SquareSum(clean, steep, root_most, _norm(p), gain_H.abs().amax())


@dataclass(frozen=True)
class Core:
    """The core around one batch, with bounds in r and e.

    `moduli` is | P~ |v| |, `norm` bounds P~, `of_p` is | P |v| |. `off_moduli` and `off_norm` are the first two for the
    constants of `own`. `long` has the lengths of the longest clean rows, `all_q` and `all_k` the largest lengths of all
    rows of a head. All are (B,).
    """

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
    all_q: Tensor
    all_k: Tensor
    squares: SquareSum

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
        all_q, all_k = (longest(of_rows.flatten(-2)) for of_rows in (q, k))
        gain_H = torch.as_tensor(mixing.gain_H, dtype=v.dtype, device=v.device).expand(v.shape[2])
        squares = SquareSum.of(p, v, gain_H)
        known = (moduli, _norm(mixed), of_p, off_moduli, _norm(off), long, all_q, all_k, squares)
        return Core(score, rows, own, precision, mixed @ v, *known)

    def rounded(self) -> Rounded:
        return Rounded(self.o, self.radius, self.error)

    def sigma(self, r: Tensor) -> Tensor:
        """Return how far a score moves."""
        r_q, r_k = self.rows.q.radius(r), self.rows.k.radius(r)
        distance = self.score.kappa * (self.long.k * r_k + r_k.square() / 2)
        return abs(self.score.s) * (self.long.q * r_k + self.long.k * r_q + r_q * r_k + distance)

    def shift(self, r: Tensor) -> Tensor:
        """Return how far all scores move together."""
        r_q, r_k = self.rows.q.radius(r), self.rows.k.radius(r)
        distance = self.score.kappa * math.sqrt(self.o.shape[-2]) * (self.long.k * r_k + r_k.square() / 2)
        return abs(self.score.s) * (self.all_q * r_k + self.all_k * r_q + r_q * r_k + distance)

    def tau(self, r: Tensor, e: Tensor) -> Tensor:
        """Return how far a computed score is off; infinite beyond the range of float32."""
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
        """Bound ||P~'|| anywhere in the ball; rows sum to 1."""
        most = math.sqrt(self.o.shape[-2])
        return torch.fmin(norm * self.sigma(r).exp(), torch.full_like(norm, most))

    def radius(self, r: Tensor) -> Tensor:
        """Bound P~' v' - P~ v = P~' (v' - v) + (P~' - P~) v; rows of o are never longer than those of v."""
        r_v, v = self.rows.v.radius(r), self.rows.v.y
        near = self.spread(self.norm, r) * r_v + torch.expm1(2 * self.sigma(r)) * self.moduli
        return torch.fmin(near, math.sqrt(v[0, ..., 0].numel()) * (2 * self.long.v + r_v))

    def error(self, r: Tensor, e: Tensor) -> Tensor:
        """Bound |P~' (v^ - v')| + tau exp(tau) (P' |v^|^2)^(1/2) + omega P~' |v^|, and two more sources of error.

        `skew` covers errors relative to the differences in exponents, of which P makes no more than its entropy. The
        last term covers the errors of the mixing.
        """
        r_v, e_v, v = self.rows.v.radius(r), self.rows.v.error(r, e), self.rows.v.y
        skew = self.precision.gamma(math.ceil(math.log(self.o.shape[-2])))
        omega, spread, turned = self.omega(r, e) + skew, self.spread(self.norm, r), torch.exp(2 * self.sigma(r))
        rows_B = math.sqrt(v[0, ..., 0].numel()) * (self.long.v + r_v + e_v)
        moduli = torch.fmin(turned * self.moduli + spread * (r_v + e_v), rows_B)
        apart = self.own.delta * torch.fmin(turned * self.of_p + math.sqrt(self.o.shape[-2]) * (r_v + e_v), rows_B)
        apart = apart + self.off_moduli + self.off_norm * (r_v + e_v)
        own = self.turned(r, e) + omega * moduli + (1 + omega) * (skew * rows_B + apart)
        return in_range(size(v) + r_v + e_v, (spread * e_v + own) * OUT + TINY)

    def turned(self, r: Tensor, e: Tensor) -> Tensor:
        """Return what errors of scores do: tau exp(tau) (P' |v^|^2)^(1/2)."""
        tau, known, most = self.tau(r, e), self.squares, math.sqrt(self.o.shape[-2])
        off = known.gain * (self.rows.v.radius(r) + self.rows.v.error(r, e))
        near = (known.clean + known.steep * self.shift(r)).sqrt() + self.spread(known.norm, r) * off
        return product(tau * torch.exp(tau), torch.fmin(near, known.root_most + most * off))

    def omega(self, r: Tensor, e: Tensor) -> Tensor:
        """Return the error of an entry of P and of its products with the values, beside that of the scores.

        It is relative to the entry for exact scores.
        """
        gamma, u, tokens = self.precision.gamma, self.precision.u, self.o.shape[-2]
        softmax, after = gamma(3 * tokens + 100) + 4 * u, gamma(tokens + 8) + self.own.roundings * u
        return torch.exp(2 * self.tau(r, e)) * (softmax + (1 + softmax) * after)


def _norm(p_BWHNN: Tensor) -> Tensor:
    """Bound nonnegative matrices by the root of the largest row sum times the largest column sum: (B,)."""
    return (p_BWHNN.sum(-2).flatten(1).amax(1) * p_BWHNN.sum(-1).flatten(1).amax(1)).sqrt()
