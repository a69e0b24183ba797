"""Sums of squares of the changes eta of queries, keys and values, from which quadratic forms of attention are built.

Each kind of sum F >= 0 can be applied, eta -> grad F(eta) / 2, and has an upper bound: numbers d for every token with
F(eta) <= sum_lk d^q |eta^q_lk|^2 + d^k |eta^k_lk|^2 + d^v |eta^v_lk|^2. delta^1~ is the linear change of the scores
less its mean under each row of P. Proofs: docs/proofs.md#attention-forms.

Letters: as in core.py; J vectors of a matrix of scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zoo.attention.theory.core import Core
from zoo.attention.theory.softmax_row import norm_upper


class QKV(NamedTuple):
    """Queries, keys and values: changes (..., B, H, N, O), or one number for each token (..., B, H, N)."""

    q: Tensor
    k: Tensor
    v: Tensor

    def plus(self, other: "QKV") -> "QKV":
        return QKV(*(one + more for one, more in zip(self, other, strict=True)))


class Squares(Protocol):
    """A sum of squares F."""

    def apply(self, eta: QKV) -> QKV: ...

    @property
    def upper(self) -> QKV: ...

    @property
    def absolute(self) -> Tensor:
        """An upper bound of the norm of the form without cancellation: (C, B). Rounding is in proportion to it."""
        ...

    def at(self, scores: Tensor, tokens: QKV) -> Tensor:
        """Estimate the largest F with delta^1~ and the tokens of eta within these: (C, B), used for choices."""
        ...


def applied(sums: Sequence[Squares], eta: QKV) -> QKV:
    return reduce(QKV.plus, (one.apply(eta) for one in sums))


def largest(sums: Sequence[Squares]) -> Tensor:
    """Return (C, B) with F(eta) <= largest |eta|^2 for their sum F."""
    return torch.stack([d.amax((-2, -1)) for d in uppers(sums)]).amax(0)


def absolutely(sums: Sequence[Squares]) -> Tensor:
    """Return (C, B), as `Squares.absolute`."""
    return reduce(torch.add, (one.absolute for one in sums))


def uppers(sums: Sequence[Squares]) -> QKV:
    return reduce(QKV.plus, (one.upper for one in sums))


def value(sums: Sequence[Squares], scores: Tensor, tokens: QKV) -> Tensor:
    return reduce(torch.add, (one.at(scores, tokens) for one in sums))


def at_tokens(d: QKV, tokens: QKV) -> Tensor:
    return reduce(torch.add, ((one * size.square()).flatten(-2).sum(-1) for one, size in zip(d, tokens, strict=True)))


class Scores:
    """The map (eta^q, eta^k) -> delta^1~ (..., B, H, N, N), and its transpose."""

    def __init__(self, core: Core) -> None:
        self.core, self.s, self.kappa = core, core.score.s, core.score.kappa

    def change(self, q: Tensor, k: Tensor) -> Tensor:
        return self.core.turned(q, k)

    def transposed(self, w: Tensor) -> tuple[Tensor, Tensor]:
        core = self.core
        w = self.s * (w - core.p * w.sum(-1, keepdim=True))
        to_keys = w.mT @ core.q
        if self.kappa:
            to_keys = to_keys - self.kappa * w.sum(-2).unsqueeze(-1) * core.k
        return w @ core.keys, to_keys

    def lengths2(self) -> Tensor:
        """Return |beta_ilk|^2 = s^2 |q_il - kappa k_lk|^2 (B, H, N, N)."""
        distance = torch.cdist(self.core.q, self.kappa * self.core.k, compute_mode="donot_use_mm_for_euclid_dist")
        return (self.s * distance).square()

    def upper(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return d^q, d^k for sum a delta^1~^2.

        The form of each row has no eigenvalue above nu = `centring`, and the row of delta^1 has two parts.
        """
        nu = self.core.softmax.centring(a)
        keys2 = (self.s * norm_upper(self.core.keys)).square().unsqueeze(-1)
        return 2 * nu * keys2, 2 * (nu.unsqueeze(-1) * self.lengths2()).sum(-2)

    def absolute(self, a: Tensor) -> Tensor:
        """Bound sum a delta^1~^2 without cancellation.

        With d_ik >= |delta^1_ik|, |delta^1~_ik| <= d_ik + sum_j p_ij d_ij, and the squares of d add up to 2 s^2 (|K|^2
        |eta^q|^2 + |Q - kappa K|^2 |eta^k|^2) at most.
        """
        core = self.core
        keys, queries = (
            one.square().sum((-2, -1)) for one in (core.keys, core.q.abs() + abs(self.kappa) * core.k.abs())
        )
        lengths2_BH = 2 * self.s**2 * torch.maximum(keys, queries)
        return ((a.amax((-2, -1)) + a.sum(-1).amax(-1)) * 2 * lengths2_BH).amax(-1)


def _means(b: Tensor) -> Tensor:
    """Bound sum_ik b_ik |eta_k - sum_j p_ij eta_j|^2, without cancellation."""
    return 8 * b.amax(-1).sum(-1).amax(-1)


@dataclass(frozen=True)
class ScoreSquares:
    """The sum of a_ilk delta^1~_ilk^2 over i, l and k."""

    scores: Scores
    a: Tensor

    def apply(self, eta: QKV) -> QKV:
        q, k = self.scores.transposed(self.a * self.scores.change(eta.q, eta.k))
        return QKV(q, k, torch.zeros_like(eta.v))

    @property
    def upper(self) -> QKV:
        q, k = self.scores.upper(self.a)
        return QKV(q, k, torch.zeros_like(k))

    @property
    def absolute(self) -> Tensor:
        return self.scores.absolute(self.a)

    def at(self, scores: Tensor, tokens: QKV) -> Tensor:
        return (self.a * scores.square()).flatten(-3).sum(-1)


@dataclass(frozen=True)
class ScoreValueSquares:
    """Squares of delta^1~, and of its difference from values along u, both less their mean under the row.

    sum_ilk a_ilk delta^1~_ilk^2 + b_ilk (m_il^(1/2) delta^1~_ilk - m_il^(-1/2) u_il . eta^v~_lk)^2
    """

    scores: Scores
    a: Tensor
    b: Tensor
    m: Tensor
    u: Tensor

    def apply(self, eta: QKV) -> QKV:
        change, along = self.scores.change(eta.q, eta.k), self.scores.core.softmax.centred_along(self.u, eta.v)
        m = self.m.unsqueeze(-1)
        both = self.b * (m * change - along)
        q, k = self.scores.transposed(self.a * change + both)
        on_values = -both / m
        on_values = on_values - self.scores.core.p * on_values.sum(-1, keepdim=True)
        return QKV(q, k, on_values.mT @ self.u)

    @property
    def upper(self) -> QKV:
        q, k = self.scores.upper(self.a + 2 * self.m.unsqueeze(-1) * self.b)
        nu = self.scores.core.softmax.centring(self.b) * self.u.square().sum(-1) / self.m
        return QKV(q, k, 2 * nu.sum(-1, keepdim=True).expand_as(k))

    @property
    def absolute(self) -> Tensor:
        m = self.m.unsqueeze(-1)
        of_values = self.b / m * self.u.square().sum(-1, keepdim=True)
        return self.scores.absolute(self.a + 2 * m * self.b) + 2 * _means(of_values)

    def at(self, scores: Tensor, tokens: QKV) -> Tensor:
        along = (self.u.norm(dim=-1) / self.m.sqrt()).unsqueeze(-1) * tokens.v.unsqueeze(-2)
        both = self.a * scores.square() + self.b * (self.m.sqrt().unsqueeze(-1) * scores + along).square()
        return both.flatten(-3).sum(-1)


@dataclass(frozen=True)
class AlongSquares:
    """The sum of b_ilk (u_il . eta^v~_lk)^2 over i, l and k: values along u, less their mean under the row."""

    core: Core
    b: Tensor
    u: Tensor

    def apply(self, eta: QKV) -> QKV:
        on = self.b * self.core.softmax.centred_along(self.u, eta.v)
        on = on - self.core.p * on.sum(-1, keepdim=True)
        return QKV(torch.zeros_like(eta.q), torch.zeros_like(eta.k), on.mT @ self.u)

    @property
    def upper(self) -> QKV:
        nu = (self.core.softmax.centring(self.b) * self.u.square().sum(-1)).sum(-1, keepdim=True)
        nu = nu.expand(self.b.shape[:-1])
        return QKV(torch.zeros_like(nu), torch.zeros_like(nu), nu)

    @property
    def absolute(self) -> Tensor:
        return _means(self.b * self.u.square().sum(-1, keepdim=True))

    def at(self, scores: Tensor, tokens: QKV) -> Tensor:
        along = self.u.norm(dim=-1, keepdim=True) * tokens.v.unsqueeze(-2)
        return (self.b * along.square()).flatten(-3).sum(-1)


@dataclass(frozen=True)
class TokenSquares:
    """The sum of d^q |eta^q_lk|^2 + d^k |eta^k_lk|^2 + d^v |eta^v_lk|^2 over l and k."""

    d: QKV

    def apply(self, eta: QKV) -> QKV:
        return QKV(*(d.unsqueeze(-1) * one for d, one in zip(self.d, eta, strict=True)))

    @property
    def upper(self) -> QKV:
        return self.d

    @property
    def absolute(self) -> Tensor:
        return torch.stack([one.amax((-2, -1)) for one in self.d]).amax(0)

    def at(self, scores: Tensor, tokens: QKV) -> Tensor:
        return at_tokens(self.d, tokens)


@dataclass(frozen=True)
class Chosen:
    """The sum of these where `where` (C, B) is True, and 0 elsewhere."""

    where: Tensor
    sums: Sequence[Squares]

    def apply(self, eta: QKV) -> QKV:
        return self._masked(applied(self.sums, eta), 3)

    @property
    def upper(self) -> QKV:
        return self._masked(uppers(self.sums), 2)

    @property
    def absolute(self) -> Tensor:
        return torch.where(self.where, absolutely(self.sums), 0.0)

    def _masked(self, whole: QKV, dims: int) -> QKV:
        where = self.where.view(*self.where.shape, *(1,) * dims)
        return QKV(*(torch.where(where, one, 0.0) for one in whole))

    def at(self, scores: Tensor, tokens: QKV) -> Tensor:
        return torch.where(self.where, value(self.sums, scores, tokens), 0.0)


@dataclass(frozen=True)
class ProductSquares:
    """The sum of w_lj |sum_i u_lij eta^q_li + x_lij eta^k_li|^2 over l and j.

    w (..., H, J), u and x (..., H, N, J).
    """

    w: Tensor
    u: Tensor
    x: Tensor

    def apply(self, eta: QKV) -> QKV:
        z = self.w.unsqueeze(-1) * (self.u.mT @ eta.q + self.x.mT @ eta.k)
        return QKV(self.u @ z, self.x @ z, torch.zeros_like(eta.v))

    @property
    def upper(self) -> QKV:
        root = self.w.sqrt().unsqueeze(-2)
        q, k = (2 * norm_upper(root * one).square().unsqueeze(-1).expand(one.shape[:-1]) for one in (self.u, self.x))
        return QKV(q, k, torch.zeros_like(k))

    @property
    def absolute(self) -> Tensor:
        return 2 * (self.w * (self.u.square().sum(-2) + self.x.square().sum(-2))).sum(-1).amax(-1)

    def at(self, scores: Tensor, tokens: QKV) -> Tensor:
        return at_tokens(self.upper, tokens)


@dataclass(frozen=True)
class ValueSquares:
    """The sum of b_ilk |eta^v~_ilk|^2 over i, l and k, less the mean under each row."""

    core: Core
    b: Tensor

    def apply(self, eta: QKV) -> QKV:
        p, mean = self.core.p, self.core.p @ eta.v
        down = self.b.sum(-2).unsqueeze(-1) * eta.v - self.b.mT @ mean
        up = self.b.sum(-1).unsqueeze(-1) * mean - self.b @ eta.v
        return QKV(torch.zeros_like(eta.q), torch.zeros_like(eta.k), down + p.mT @ up)

    @property
    def upper(self) -> QKV:
        nu = self.core.softmax.centring(self.b).sum(-1, keepdim=True).expand(self.b.shape[:-1])
        return QKV(torch.zeros_like(nu), torch.zeros_like(nu), nu)

    @property
    def absolute(self) -> Tensor:
        return _means(self.b)

    def at(self, scores: Tensor, tokens: QKV) -> Tensor:
        return (self.b * tokens.v.square().unsqueeze(-2)).flatten(-3).sum(-1)
