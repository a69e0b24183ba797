"""One row p = softmax(s) of attention whose scores s change by delta: bounds of first and second order.

    slope       ||D softmax|| <= min(1/2, max p, max 2 p (1 - p))
    peak        max p
    curvature   ||D^2 softmax|| <= min(sqrt(6) / 9, slope sqrt(1 + max p))

hold on the whole ball |delta| <= change, as on it each logit log(p / (1 - p)) moves by at most sqrt(2) change. z~ is z
minus its mean under p; Var, Cov and sd are those under p. With tau = max_k |delta~_k| and E1(t) = (e^t - 1) / t, E2(t)
= (e^t - 1 - t) / t^2,

    |<p' - p, c>|                    <=  E1(tau) sd(delta) sd(c)
    |<p' - p, c> - Cov_p(delta, c)|  <=  E2(tau) sum_k p_k |c~_k| delta~_k^2 + third_cumulant(tau, sd) sd(c) Var(delta)

hold for every delta, but grow exponentially with tau, and are not used beyond TAU_MAX. ROUND and the certificate's
slack cover the relative error of matrix products and sums. Proofs: docs/proofs.md#softmax-path.

Letters: B images, C classes, H heads, N tokens (i row, k column), O width of a head; "..." is C or nothing.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from zoo.arithmetic import UNDERFLOW

ROUND = 1 + 1e-11
TINY = 1e-280  # the trace of a matrix that is as good as zero
TAU_MAX = 50.0  # beyond it the forms with exponentials are not used
LOGIT_MAX = 700.0  # the logit of a probability that underflows, or nearly
K2_MAX = 0.2721655271  # sqrt(6) / 9, rounded up: sup |D^2 softmax[v, v]| / |v|^2


def eigenvalue_upper(a: Tensor) -> Tensor:
    """Bound lambda_max <= (tr A^32)^(1/32) of symmetric positive matrices (..., n, n).

    The bound is at most n^(1/32) too large, and needs only matrix products, which a GPU computes in batches. It is
    scaled by the trace, so that nothing overflows. Proof: docs/proofs.md#trace-bound.
    """
    trace = a.diagonal(dim1=-2, dim2=-1).sum(-1)
    power = a / trace.clamp_min(TINY)[..., None, None]
    for _ in range(4):
        power = power @ power
    root = power.square().sum((-2, -1)) ** (1 / 32)
    return torch.where(trace > TINY, root * trace, trace).clamp_min(0) * ROUND


def norm_upper(a: Tensor) -> Tensor:
    """Bound the spectral norm (..., m, n) -> (...); where its squares underflow, by sqrt(m n) max |a_ij|."""
    most = a.abs().amax((-2, -1))
    found = eigenvalue_upper(a @ a.mT if a.shape[-2] <= a.shape[-1] else a.mT @ a).sqrt()
    return torch.where(most < UNDERFLOW, math.sqrt(a.shape[-2] * a.shape[-1]) * most, found)


def e1(t: Tensor) -> Tensor:
    """Return (e^t - 1) / t, 1 at 0."""
    return torch.where(t > 0, torch.expm1(t) / t, 1.0) * ROUND


def e2(t: Tensor) -> Tensor:
    """Return (e^t - 1 - t) / t^2, 1/2 at 0.

    Below 1/2 it is the series sum_j t^j / (j + 2)!, whose rest after j = 12 is < 1e-15.
    """
    series = torch.zeros_like(t)
    for j in range(12, -1, -1):
        series = series * t + 1 / math.factorial(j + 2)
    return torch.where(t < 0.5, series, (torch.expm1(t) - t) / t.square()) * ROUND


def e3(t: Tensor) -> Tensor:
    """Return (e^t - 1 - t - t^2 / 2) / t^3, 1/6 at 0: the integral of (1 - s)^2 e^{s t} / 2 over 0 <= s <= 1."""
    series = torch.zeros_like(t)
    for j in range(14, -1, -1):
        series = series * t + 1 / math.factorial(j + 3)
    return torch.where(t < 1, series, (torch.expm1(t) - t - t.square() / 2) / t**3) * ROUND


def third_cumulant(t: Tensor, sd: Tensor) -> Tensor:
    """Return h = (e^{2 tau} / 2 + e^{3 tau} sd^2 / 10) sd.

    kappa_3 is at most e^{t tau} sum p |c~| delta~^2, plus, from moving the centres from t = 0, 3 t e^{2 t tau} sd(c)
    sd^3 + 2 t^3 e^{3 t tau} sd(c) sd^5; the integral is taken with 1 - t. Proof: docs/proofs.md#softmax-path.
    """
    return sd * (torch.exp(2 * t) / 2 + torch.exp(3 * t) * sd.square() / 10)


def exponential(form: Callable[[Tensor], Tensor], tau: Tensor) -> Tensor:
    """Return form(tau), and infinity where tau is too large for it."""
    return torch.where(tau <= TAU_MAX, form(tau.clamp(max=TAU_MAX)), math.inf)


class SoftmaxRows:
    """The rows of P (B, H, N, N) at the clean scores."""

    def __init__(self, p: Tensor) -> None:
        self.p, self.max_BHN, self.square_BHN = p, p.amax(-1), p.square().sum(-1)
        # The largest logit of each row, and the one closest to 0; 1 - p without cancellation.
        largest = torch.zeros_like(p, dtype=torch.bool).scatter_(-1, p.argmax(-1, keepdim=True), True)
        others = p.masked_fill(largest, 0).sum(-1, keepdim=True)
        logit = p.log() - torch.where(largest, others, 1 - p).log()
        self.logit_max_BHN = logit.amax(-1)
        self.logit_near_BHN = logit.abs().amin(-1).clamp_max(LOGIT_MAX)
        self.slope_BHN = self.slope(torch.zeros_like(self.max_BHN))

    def slope(self, change_BHN: Tensor) -> Tensor:
        """Bound ||D softmax|| <= min(1/2, max p, max 2 p (1 - p)), while the row of scores moves by at most `change`.

        Proof: docs/proofs.md#softmax-first-order.
        """
        near = (self.logit_near_BHN - _logits(change_BHN)).clamp_min(0)
        mixed = 2 * near.sigmoid() * (-near).sigmoid() * ROUND
        return torch.minimum(mixed, self.peak(change_BHN)).clamp_max(0.5)

    def peak(self, change_BHN: Tensor) -> Tensor:
        """Bound max p on the same ball."""
        return (self.logit_max_BHN + _logits(change_BHN)).sigmoid() * ROUND

    def curvature(self, change_BHN: Tensor) -> Tensor:
        """Bound ||D^2 softmax|| <= min(sqrt(6) / 9, slope sqrt(1 + max p)) on the same ball.

        Proof: docs/proofs.md#softmax-second-order.
        """
        return (self.slope(change_BHN) * (1 + self.peak(change_BHN)).sqrt()).clamp_max(K2_MAX)

    def centred(self, z: Tensor) -> Tensor:
        """Return z~_ik = z_k minus its mean under p_i: (B, H, N, O) -> (B, H, N, N, O)."""
        return z.unsqueeze(-3) - (self.p @ z).unsqueeze(-2)

    def centred_along(self, o: Tensor, v: Tensor) -> Tensor:
        """Return c~_ik = o_i . v~_k: o (C, B, H, N, O) -> (C, B, H, N, N)."""
        c = o @ v.mT
        return c - (self.p * c).sum(-1, keepdim=True)

    def deviation(self, z: Tensor) -> Tensor:
        """Return the sd of z under each row, in the direction where it is largest: (B, H, N, O) -> (B, H, N)."""
        return norm_upper(self.p.unsqueeze(-1).sqrt() * self.centred(z))

    def centring(self, w: Tensor) -> Tensor:
        """Return lambda_max of the form sum_k w_k z~_k^2 in z, that is of (I - p 1^T) diag(w) (I - 1 p^T).

        Rows are (..., H, N). The form is diag(w) plus a matrix of rank two with trace t and determinant -(|p|^2 |w|^2 -
        (p.w)^2).
        """
        total, inner = w.sum(-1), (w * self.p).sum(-1)
        t = self.square_BHN * total - 2 * inner
        area = (self.square_BHN * w.square().sum(-1) - inner.square()).clamp_min(0)
        return w.amax(-1) + 0.5 * (t + (t.square() + 4 * area).sqrt()).clamp_min(0)


def _logits(change: Tensor) -> Tensor:
    """Return how far logits move while the scores of a row move by `change`."""
    return math.sqrt(2) * ROUND * change
