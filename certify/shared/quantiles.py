"""Sums of squares of multilinear forms of Gaussian vectors that are seldom small.

The squares of a linear form are chi^2. For independent Gaussian vectors X, Y and any matrix H with |H|_F = 1,

    E exp(-t <X, H Y>^2)  <=  L(t) = E (1 + 2 t x^2)^(-1/2),      x normal,

the worst H being of rank one. So P[ sum_m <X_m, H Y_m>^2 <= s ] <= e^(t s) L(t)^M for M pairs and every t > 0. The same
holds for tensors and triples of vectors, with x y for x, y normal. Proof: docs/proofs.md#pairs.

A weighted mean of the lengths of Gaussian vectors of R^M, however they depend on each other, is small as seldom as one
length is by this bound, since x^-p is convex: P[ mean <= x ] <= x^p E |X|^-p for every p < M. Proof:
docs/proofs.md#lengths.
"""

import math
from functools import cache

import torch

STEPS, END = {2: (1e-4,), 3: (2e-3, 2e-2)}, 8.0  # of the sums that bound L
TAIL = 2e-15  # above P[|x| > END]
TRIED_POWERS = 400  # values of p / count; any are sound
TRIED = torch.logspace(-2, 3, 51, dtype=torch.float64).tolist()  # values of t; any are sound


def least_square_sum(count: int, chance: float) -> float:
    """Return x with P[chi^2 with `count` degrees of freedom <= x] <= chance.

    Chernoff's bound is (t e^(1 - t))^(count / 2) for x = t count, t <= 1, which grows with t. Proof:
    docs/proofs.md#probes.
    """
    low, high = 0.0, 1.0
    for _ in range(100):
        t = (low + high) / 2
        if t > 0 and math.log(t) + 1 - t > 2 / count * math.log(chance):
            high = t
        else:
            low = t
    return low * count


@cache
def least_product_sum(count: int, order: int, chance: float) -> float:
    """Return s with P[sum of squares of a multilinear form of norm 1 <= s] <= chance; 0 where none is known.

    The sum is over `count` pairs (order 2) or triples (order 3) of Gaussian vectors; the norm is Frobenius'.
    """
    logs = ((t, math.log(_transform(t, order))) for t in TRIED)
    return max(0.0, *((math.log(chance) - count * log) / t for t, log in logs)) * (1 - 1e-9)


@cache
def least_mean_length(count: int, chance: float) -> float:
    """Return x with P[mean of lengths of Gaussian vectors of R^count <= x] <= chance, for all weights of the mean."""

    def log_least(p: float) -> float:
        moment = math.lgamma((count - p) / 2) - math.lgamma(count / 2) - p / 2 * math.log(2)
        return (math.log(chance) - moment) / p

    return math.exp(max(log_least(count * k / TRIED_POWERS) for k in range(1, TRIED_POWERS))) * (1 - 1e-9)


def _transform(t: float, order: int) -> float:
    """Bound L(t) from above: what is integrated falls with every variable."""
    square, share = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for step in STEPS[order]:
        x = torch.arange(0.0, END, step, dtype=torch.float64)
        density = step * (2 / math.pi) ** 0.5 * torch.exp(-x.square() / 2)
        square, share = (torch.outer(*pair).flatten() for pair in ((square, x.square()), (share, density)))
    return min(1.0, float((share * (1 + 2 * t * square).rsqrt()).sum()) * (1 + 1e-9) + TAIL * (order - 1))
