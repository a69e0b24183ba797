"""The steps of the proofs of attention, one by one: every summand and every intermediate inequality, row by row.

Ascent on a whole form cannot detect a false step between loose ones. Changes are drawn within the reaches of hundreds
of cores, then climb on the ratio of the two sides of one step. Letters: as in tests/tools/attention_cores.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tools.ascent import ascend
from tests.tools.attention_cases import random_
from tests.tools.attention_cores import SCORES, B, Case, H, N, W, X, case_of
from tests.tools.cases import mostly_slow
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.local import heads_of
from zoo.attention.theory.core import Core, QKVRadii, Score, SeminormBound
from zoo.attention.theory.everywhere import HALF_STEP, moved_everywhere
from zoo.attention.theory.forms import CoreForms
from zoo.attention.theory.joint import JointCore, same
from zoo.attention.theory.score_range import ScoreRange
from zoo.attention.theory.softmax_row import K2_MAX, e1, e2, norm_upper, third_cumulant
from zoo.attention.theory.squares import (
    QKV,
    AlongSquares,
    Scores,
    ScoreSquares,
    ScoreValueSquares,
    Squares,
    ValueSquares,
)
from zoo.attention.theory.third_forms import ThirdRows

SEEDS = 20  # changes for each of B cores
RADII = (0.01, 0.3, 3.0)
Sides = dict[str, tuple[Tensor, Tensor]]  # the two sides of each step: the bounded value and its bound; B comes first


@dataclass(frozen=True)
class Move:
    """The exact effect of one change eta (B, 3, H, N, W) on a core."""

    core: Core
    eta: Tensor

    @property
    def parts(self) -> QKV:
        return QKV(*self.eta.unbind(1))

    @cached_property
    def by_q(self) -> Tensor:
        """Return s <eta^q, k>."""
        return self.core.score.s * self.parts.q @ self.core.k.mT

    @cached_property
    def by_k(self) -> Tensor:
        """<beta, eta^k>."""
        core, score, k = self.core, self.core.score, self.parts.k
        return score.s * (core.q @ k.mT - score.kappa * (core.k * k).sum(-1).unsqueeze(-2))

    @cached_property
    def products(self) -> Tensor:
        """Return Q."""
        q, k, _ = self.parts
        score = self.core.score
        return score.s * (q @ k.mT - score.kappa / 2 * k.square().sum(-1).unsqueeze(-2))

    @cached_property
    def delta1(self) -> Tensor:
        return self.centred(self.by_q + self.by_k)

    @cached_property
    def delta(self) -> Tensor:
        return self.delta1 + self.centred(self.products)

    def centred(self, z: Tensor) -> Tensor:
        return z - (self.core.p * z).sum(-1, keepdim=True)

    def behind(self, delta: Tensor) -> Tensor:
        """Return the softmax after this change of the scores."""
        return (self.core.p.log() + delta).softmax(-1)

    @cached_property
    def change(self) -> Tensor:
        """Return P' - P."""
        return self.behind(self.delta) - self.core.p

    @cached_property
    def inputs(self) -> Tensor:
        """Return eta^v, with the gain of the head."""
        return self.core.gain_H[:, None, None] * self.parts.v

    @cached_property
    def covariance(self) -> Tensor:
        """Return Cov(Q, v)."""
        return (self.core.p * self.centred(self.products)) @ self.core.values

    @cached_property
    def nonlinear(self) -> Tensor:
        """Return (P' - P) v - Cov(delta, v)."""
        return (self.change - self.core.p * self.delta) @ self.core.values


def length(z: Tensor) -> Tensor:
    return z.norm(dim=-1)


def weighted(a: Tensor, z: Tensor) -> Tensor:
    """Return sum_k a_k z_k^2 of every row."""
    return (a * z.square()).sum(-1)


def worth(squares: Squares, eta: Tensor) -> Tensor:
    """Return F(eta) of every core."""
    applied = squares.apply(QKV(*eta.unbind(1)))
    return (torch.stack([one.reshape(eta[:, 0].shape) for one in applied], 1) * eta).flatten(1).sum(1)


# forms ----------------------------------------------------------------------------------------------------------------


def gradient_steps(forms: CoreForms, reach: ScoreRange, move: Move, o: Tensor) -> Sides:
    """Yield T1, T2 and T3 within the reach."""
    core, (_, _, v) = forms.core, move.parts
    c, gained = core.directional(o), core.gain_H[:, None, None] * o
    y, size = gained @ v.mT, length(gained).unsqueeze(-1)
    a, quadratic = forms._t2(c[None], reach)[0], move.centred(move.products)
    t1 = -(core.p * c * move.products).flatten(1).sum(1)
    t2 = -((move.change - core.p * move.delta) * c).sum(-1)
    both = size.sqrt() * move.delta - move.centred(y) / size.sqrt()
    return {
        "reach of Q~": (quadratic.abs(), reach.quadratic),
        "reach of delta~": (move.delta.abs(), reach.delta),
        "T1": (t1, sum((worth(one, move.eta) for one in forms.t1((core.p * c)[None], reach)), 0 * t1)),
        "T2": (t2, weighted(a, move.delta)),
        "T3": (-(move.change * y).sum(-1), 0.25 * weighted(forms._t3(reach), both)),
        "Q~ by Q": (weighted(a, quadratic), weighted(reach.centred(a), move.products)),
        "Q by tokens": (weighted(a, move.products).flatten(1).sum(1), worth(reach.products(a), move.eta)),
    }


def rest_steps(forms: CoreForms, reach: ScoreRange, move: Move) -> Sides:
    """Yield A, B and C within the reach; B = B1 + B2, the effects of delta^1 and Q."""
    core, weights, quadratic = forms.core, forms.weights(reach), move.centred(move.products)
    a, (exponential, box) = forms._chosen_nonlinear(reach, weights.by_values), forms._nonlinear(reach)
    b = reach.centred(a)
    linear, turned = (weighted(one, move.products).sqrt() for one in (forms.covariance, b))
    spread, of_box = forms._turned(reach)
    moved2, inputs2 = length(move.change @ move.inputs).square(), core.softmax.centred(move.parts.v).square().sum(-1)
    one, two, nonlinear2 = length(move.covariance), weighted(a, quadratic).sqrt(), length(move.nonlinear).square()
    parts = (weighted(a, move.delta1).sqrt(), one + two, moved2.sqrt())
    shares = (part.square() / t.view(-1, 1, 1) for part, t in zip(parts, weights.shares, strict=True))
    return {
        "A": (one.square(), weighted(forms.covariance, move.products)),
        "B by exponentials": (torch.where(reach.gentle, nonlinear2, 0.0), weighted(exponential, move.delta)),
        "B by the box": (nonlinear2, weighted(box, move.delta)),
        "B1 + B2": (weighted(a, move.delta).sqrt(), parts[0] + two),
        "B2": (two.square(), weighted(b, move.products)),
        "A + B2": ((linear + turned).square(), weighted(forms.joined(b, weights), move.products)),
        "C by exponentials": (torch.where(reach.gentle, moved2, 0.0), (spread * core.p * inputs2).sum(-1)),
        "C by the box": (moved2, (of_box * inputs2).sum(-1)),
        "R": (length(move.covariance + move.nonlinear + move.change @ move.inputs).square(), sum(shares, 0 * one)),
    }


def steps_everywhere(forms: CoreForms, reach: ScoreRange, move: Move, o: Tensor) -> Sides:
    """Yield the steps that hold for any movement of the scores."""
    core, (q, k, v) = forms.core, move.parts
    size, sd = norm_upper(core.values).unsqueeze(-1), weighted(core.p, move.delta1).sqrt()
    first, x, linear = move.behind(move.delta1) - core.p, length(move.products), length(move.delta1)
    c, s, more = core.directional(o), core.s, 1 + core.score.kappa / 2
    middle, y = (c - c.mean(-1, keepdim=True)).norm(dim=-1), (core.gain_H[:, None, None] * o) @ v.mT
    second, whole_k = move.change - first, k.flatten(-2).norm(dim=-1).unsqueeze(-1)
    root = s**0.5 / 2 * (length(q) + more * whole_k)
    along, inputs = (core.p * move.delta1) @ core.values, core.softmax.centred(move.inputs).flatten(-2)
    far = linear / 2 + HALF_STEP * x.sqrt()
    return {
        "x": (x, s * whole_k * (length(q) + core.score.kappa / 2 * whole_k)),
        "root of x": (x.sqrt(), root),
        "p1 - p": (length(first), linear / 2),
        "p' - p1": (length(second), torch.minimum(x / 2, HALF_STEP * x.sqrt())),
        "p1 V, linear part": (length(first @ core.values - along), size * linear / 2 + core.nu_BHN * sd),
        "their square": (
            (size * linear / 2 + core.nu_BHN * sd).square(),
            weighted(moved_everywhere(core, reach), move.delta1),
        ),
        "(p' - p1) V": (length(second @ core.values), HALF_STEP * x.sqrt() * size),
        "(p' - p) eta^v": (length(move.change @ move.inputs), 2**0.5 * length(inputs)),
        "nonlinear along c": (-((first - core.p * move.delta1) * c).sum(-1), K2_MAX / 2 * middle * linear.square()),
        "Q along c": (-(second * c).sum(-1), x / 2 * middle),
        "along y": (-(move.change * y).sum(-1), far * length(y)),
    }


NODES = 12  # of the quadrature over 0 <= t <= 1


def third_steps(forms: CoreForms, reach: ScoreRange, move: Move, o: Tensor) -> Sides:
    """Yield the steps of the third order: those along the way at every t, and integrals by quadrature."""
    core, rows, q = forms.core, ThirdRows(reach), move.centred(move.products)
    c, y = core.directional(o), move.centred((core.gain_H[:, None, None] * o) @ move.parts.v.mT)
    t, weight = legendre()
    p = move.behind(t * move.delta1 + t**2 * q)  # one t after the other, before B
    a = move.delta1 + 2 * t * q
    c_t, a_t, y_t, q_t = (z - (p * z).sum(-1, keepdim=True) for z in (c, a, y, q))

    def mean(*factors: Tensor) -> Tensor:
        return reduce(torch.mul, factors, p).sum(-1)

    def integral(power: int, z: Tensor) -> Tensor:
        """Return the integral of (1 - t)^power / power times z, row by row where exponentials are allowed."""
        whole = (weight * (1 - t) ** power / power).view(-1, 1, 1, 1) * z
        return torch.where(reach.gentle, whole.sum(0), 0.0)

    (c_0, c_1), (a_0, a_1) = rows.values(c), rows.a
    kappa_4 = mean(c_t, a_t, a_t, a_t) - 3 * mean(a_t, a_t) * mean(c_t, a_t)
    exact = integral(2, kappa_4 + 6 * mean(c_t, a_t, q_t)) + integral(1, mean(y_t, a_t, a_t) + 2 * mean(y_t, q_t))
    second = mean_second(core, move, c, y)
    rest = ((move.change - core.p * move.delta) * c).sum(-1) + (move.change * y).sum(-1)
    miss = torch.where(reach.tau <= 1, rest + (core.p * c * q).sum(-1) - second / 2 - exact, 0.0)
    gentle, fourth = reach.gentle.unsqueeze(-1), rows.fourth(c)
    of_a = weighted(2 * fourth, move.delta1) + weighted(8 * fourth, q)
    return {
        "R_3": (miss.abs(), 1e-9 * (1 + rest.abs())),
        "c - E_t c": (torch.where(gentle, c_t.abs() - t * c_1, 0.0).amax(0), c_0),
        "a - E_t a": (torch.where(gentle, a_t.abs() - t * a_1, 0.0).amax(0), a_0),
        "square": (integral(2, mean(c_0 + t * c_1, q_t, q_t)), weighted(rows.square(c_0, c_1), q)),
        "line": (integral(1, mean(a_0 + t * a_1, y_t, y_t)), weighted(rows.line(a_0, a_1), y)),
        "kappa_4": (integral(2, kappa_4).abs(), of_a),
    }


def mean_second(core: Core, move: Move, c: Tensor, y: Tensor) -> Tensor:
    """Return kappa_3(c, delta^1, delta^1) + 2 Cov(c, Q) + 2 Cov(y, delta^1), row by row."""
    return (core.p * (c * move.delta1.square() + 2 * c * move.products + 2 * y * move.delta1)).sum(-1)


def legendre() -> tuple[Tensor, Tensor]:
    """Return the nodes t of Gauss and Legendre in [0, 1], before (B, H, N, N), and their weights."""
    x, weight = np.polynomial.legendre.leggauss(NODES)
    t = torch.from_numpy((x + 1) / 2).view(-1, 1, 1, 1, 1)
    return t, torch.from_numpy(weight / 2).view_as(t)


def all_steps(case: Case, r: float) -> list[Callable[[Tensor], Sides]]:
    """Return the kinds of steps, for changes within the exact reaches of |u| <= r."""
    forms, o = CoreForms(case.core), case.g[0]
    reach = forms.reach(case.reach(r))

    def at(steps: Callable[..., Sides], *gradient: Tensor) -> Callable[[Tensor], Sides]:
        return lambda u: steps(forms, reach, Move(case.core, case.eta(u)), *gradient)

    return [at(gradient_steps, o), at(rest_steps), at(steps_everywhere, o), at(third_steps, o)]


def shares(sides: Sides) -> dict[str, Tensor]:
    """Return the largest ratio in each core (B,), with 0 / 0 = 0 and rounding of the two ignored."""
    return {
        name: ((low - 1e-12) / high.clamp_min(1e-12)).reshape(len(high), -1).amax(1)
        for name, (low, high) in sides.items()
    }


@pytest.mark.parametrize("score", SCORES)
def test_every_step_holds_at_random_changes_of_hundreds_of_cores(score: str) -> None:
    generator, found = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for seed in range(SEEDS):
        case = case_of(SCORES[score], seed)
        for r in RADII:
            u = torch.randn(B, X, generator=generator, dtype=torch.float64)
            for sides in all_steps(case, r):
                for name, share in shares(sides(r * u / u.norm(dim=1, keepdim=True))).items():
                    found[name] = torch.maximum(found.get(name, share), share)
    worst = {name: float(share.max()) for name, share in found.items()}
    assert all(share <= 1 + 1e-9 for share in worst.values()), worst


@pytest.mark.parametrize("r", mostly_slow(RADII, 0.3))
@pytest.mark.parametrize("score", mostly_slow(SCORES, "distances"))
def test_no_ascent_beats_a_step(score: str, r: float) -> None:
    case, worst = case_of(SCORES[score]), dict[str, float]()
    for sides in all_steps(case, r):
        for name in sides(torch.ones(B, X).double()):

            def share(u: Tensor, name: str = name, sides: Callable[[Tensor], Sides] = sides) -> Tensor:
                return shares(sides(u))[name]

            found = ascend(share, torch.zeros(B, X).double(), torch.full((B,), r).double(), 12, 1)
            worst[name] = float(found.max())
    print({name: round(share, 3) for name, share in worst.items()})
    assert all(share <= 1 + 1e-9 for share in worst.values()), worst


@pytest.mark.parametrize("score", [{"s": -1.0, "kappa": 1.0}, {"s": -1.0, "tied": True}, {"s": 1.0, "kappa": -1.0}])
def test_scores_of_distances_have_a_positive_scale(score: dict[str, Any]) -> None:
    """The forms of T1 assume a positive scale."""
    with pytest.raises(ValueError, match="distances need s > 0"):
        Score(**score)


# sums of squares and their largest values -----------------------------------------------------------------------------


@pytest.mark.parametrize("score", SCORES)
def test_no_sum_of_squares_is_above_what_it_says(score: str) -> None:
    """F(eta) <= sum d |eta|^2, and F(eta) equals `apply`."""
    generator = torch.Generator().manual_seed(1)
    for seed in range(SEEDS):
        case = case_of(SCORES[score], seed)
        scores, eta = Scores(case.core), torch.randn(B, 3, H, N, W, generator=generator).double()
        if case.core.score.tied:
            eta[:, 0] = eta[:, 1]
        a, b = torch.rand(2, B, H, N, N, generator=generator).double() ** 8
        m, u = (
            torch.rand(B, H, N, generator=generator).double().exp(),
            torch.randn(B, H, N, W, generator=generator).double(),
        )
        move = Move(case.core, eta)
        along = case.core.softmax.centred_along(u, move.parts.v)
        both = m.sqrt().unsqueeze(-1) * move.delta1 - along / m.sqrt().unsqueeze(-1)
        values2 = case.core.softmax.centred(move.parts.v).square().sum(-1)
        whole: list[tuple[Squares, Tensor]] = [
            (ScoreSquares(scores, a), weighted(a, move.delta1)),
            (ScoreValueSquares(scores, a, b, m, u), weighted(a, move.delta1) + weighted(b, both)),
            (ValueSquares(case.core, a), (a * values2).sum(-1)),
            (AlongSquares(case.core, a, u), weighted(a, along)),
        ]
        for squares, rows in whole:
            torch.testing.assert_close(worth(squares, eta), rows.flatten(1).sum(1), rtol=1e-9, atol=1e-9)
            most = sum(
                (d * part.square().sum(-1)).flatten(1).sum(1) for d, part in zip(squares.upper, move.parts, strict=True)
            )
            assert (rows.flatten(1).sum(1) <= most * (1 + 1e-9)).all()


# seminorms ------------------------------------------------------------------------------------------------------------


def joint_case(seed: int) -> tuple[JointCore, Tensor, Tensor, QKVRadii]:
    torch.manual_seed(seed)
    module = random_(DotProductAttention(H * W, H), 10 ** (seed % 5 / 4 - 0.5))
    x, eta = torch.randn(B, N, H * W).double(), torch.randn(B, N, H * W).double() * torch.rand(B, N, 1).double() ** 4
    q, k, v = module.projections(x)
    p = (module.scale * q @ k.mT).softmax(-1)
    weight = module.head_weights_3HOD()
    moved = torch.einsum("bnd,xhod->bxhno", eta, weight)
    return (
        JointCore(heads_of(module), q, k, v, p, p),
        moved,
        torch.randn(B, H, N, W).double(),
        same(eta.flatten(1).norm(dim=1)),
    )


def separate_case(score: str, seed: int) -> tuple[Core, Tensor, Tensor, QKVRadii]:
    case = case_of(SCORES[score], seed)
    torch.manual_seed(seed)
    eta = case.eta(torch.randn(B, X).double())
    return case.core, eta, case.g[0], QKVRadii(*(part.flatten(1).norm(dim=1) for part in eta.unbind(1)))


def seminorms(core: Core, o: Tensor) -> dict[str, tuple[Callable[[Tensor], Tensor], SeminormBound, int]]:
    """Return the seminorm of a change z of the scores, its bound, and the number of the bound's dimensions behind B."""
    p, c = core.p, core.directional(o)

    def centred(z: Tensor) -> Tensor:
        return z - (p * z).sum(-1, keepdim=True)

    def moved(z: Tensor) -> Tensor:
        return z - z.mean(-1, keepdim=True)

    def all_rows(w: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda z: weighted(w, centred(z)).flatten(1).sum(1).sqrt()

    def whole(z: Tensor) -> Tensor:
        matrix = moved(z).flatten(-2).norm(dim=-1)
        return matrix.norm(dim=-1, keepdim=True) if core.together else matrix

    entry, of_row = core.entry_seminorms(c.abs())
    gradient = core.remainder(o[None])
    of_length = gradient.length_seminorm
    of_sd, sd = gradient.shifted, weighted(p, c).sqrt()
    return {
        "||S' - S||": (whole, core.matrix, 1),
        "rows": (lambda z: moved(z).norm(dim=-1), core.row, 2),
        "tau": (lambda z: centred(z).abs().flatten(1).amax(1), core.tau, 0),
        "deviation": (lambda z: weighted(p, centred(z)).sqrt(), core.deviation, 2),
        "nu^2 p": (all_rows(core.nu_BHN.square().unsqueeze(-1) * p), core.value_seminorm, 0),
        "max(p) p": (all_rows(p.amax(-1, keepdim=True) * p), core.input_seminorm, 0),
        "p |c|": (all_rows(p * c.abs()), entry, 0),
        "p |c|, row by row": (lambda z: weighted(p * c.abs(), centred(z)).sqrt(), of_row, 2),
        "sd(c) p": (all_rows(sd.unsqueeze(-1) * p), SeminormBound(*(_first(one) for one in of_sd)), 0),
        "|o| p": (all_rows(length(o).unsqueeze(-1) * p), SeminormBound(*(_first(one) for one in of_length)), 0),
    }


def _first(z: Tensor | float) -> Tensor:
    z = torch.as_tensor(z)
    return z[0] if z.ndim == 2 and z.shape[0] == 1 else z


CASES: dict[str, Callable[[int], tuple[Core, Tensor, Tensor, QKVRadii]]] = {
    "one input": joint_case,
    **{score: partial(separate_case, score) for score in SCORES},
}


@pytest.mark.parametrize("kind", CASES)
def test_every_summand_of_a_seminorm_bound_holds_by_itself(kind: str) -> None:
    """The summands are of queries, of keys, and of both together."""
    for seed in range(SEEDS):
        core, eta, o, radii = CASES[kind](seed)
        move = Move(core, eta)
        for name, (seminorm, bound, dims) in seminorms(core, o).items():
            r = radii.of(dims)
            only_q, only_k = bound.first(QKVRadii(r.q, 0 * r.k, r.v)), bound.first(QKVRadii(0 * r.q, r.k, r.v))
            sides = [(move.by_q, only_q), (move.by_k, only_k), (move.products, bound.second(r))]
            if name == "tau" and kind == "one input":  # both of first order in one functional
                sides[:2] = [(move.by_q + move.by_k, bound.first(r))]
            for part, most in sides:
                assert (seminorm(part) <= most * (1 + 1e-9) + 1e-12).all(), name


# the norm of the remainder, and the one-sided remainder ---------------------------------------------------------------


def remainder_steps(core: Core, move: Move, o: Tensor, r: QKVRadii) -> Sides:
    """Yield T1, T2, T3 and the three parts of each form of beta, before W_O."""
    c, y = core.directional(o), (core.gain_H[:, None, None] * o) @ move.parts.v.mT
    tau, change = core.tau.at(r), core.change(r)
    t1, t2, t3 = (part if isinstance(part, dict) else {"": part} for part in core.remainder(o[None]).terms(r))
    exact = (
        -(core.p * c * move.products).flatten(1).sum(1),
        -((move.change - core.p * move.delta) * c).flatten(1).sum(1),
        -(move.change * y).flatten(1).sum(1),
    )
    sides = {f"T{i} {name}": (exact[i - 1], of[0]) for i, t in ((1, t1), (2, t2), (3, t3)) for name, of in t.items()}
    deviation, (whole, row, shifted) = core.deviation.at(r.of(2)), core._value_seminorms
    h, factor = third_cumulant(tau, deviation.amax((-2, -1))), e2(tau)
    z = factor.view(-1, 1, 1) * row.at(r.of(2)).square() + h.view(-1, 1, 1) * core.nu_BHN * deviation.square()
    together = factor * whole.at(r).square() + h * shifted.at(r).square()
    inputs = e1(tau) * core.norm_v_max * r.v * core.input_seminorm.at(r)
    slope = core.worst(core.softmax.slope_BHN.amax(-1))
    matrix = move.change.flatten(-2).norm(dim=-1)
    gentle = tau < 50
    return sides | {
        "Cov(Q, v)": (move.covariance.flatten(1).norm(dim=1), core.value_seminorm.second(r)),
        "nonlinear rows": (torch.where(gentle.view(-1, 1, 1), length(move.nonlinear), 0.0), z.nan_to_num(torch.inf)),
        "nonlinear": (
            torch.where(gentle, length(move.nonlinear).flatten(1).sum(1), 0.0),
            together.nan_to_num(torch.inf),
        ),
        "(P' - P) eta^v": ((move.change @ move.inputs).flatten(1).norm(dim=1), inputs.nan_to_num(torch.inf)),
        "P' - P": (matrix.norm(dim=-1, keepdim=True) if core.together else matrix, change.p),
        "DP Q": (
            (core.p * move.centred(move.products)).flatten(-2).norm(dim=-1),
            slope * core.matrix.second(r.of(1)).expand_as(slope),
        ),
    }


@pytest.mark.parametrize("size", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("kind", CASES)
def test_every_summand_of_a_remainder_holds_by_itself(kind: str, size: float) -> None:
    worst = dict[str, float]()
    for seed in range(SEEDS):
        core, eta, o, radii = CASES[kind](seed)
        r = QKVRadii(*(size * one for one in radii))
        for name, share in shares(remainder_steps(core, Move(core, size * eta), o, r)).items():
            worst[name] = max(worst.get(name, 0.0), float(share.max()))
    assert all(share <= 1 + 1e-9 for share in worst.values()), worst
