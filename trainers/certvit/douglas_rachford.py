"""CertViT's constrained layer (docs/references.md#certvit, Problem 2): the sparsest weights with the same outputs.

    minimise ||W||_1   subject to   c_j(W) <= 0  for every mini-batch j = 1 .. J,
    c_j(W) = mean_t d( W x_t + b - y_t )^2 - eta mean_t ||y_t - b||^2,     d the distance to the subdifferential of y_t

(x_t, y_t) are inputs and outputs of the original layer. Without a following activation, d = || . ||. Before ReLU_theta,
the entries of y_t at 0 may decrease and those at theta may increase at no cost (eq. 7-8). Both sets are convex, so the
iteration (Algorithm 1)

    V_n = prox(U_n),    P_n = proj_C( 2 V_n - U_n ),    U_{n+1} = U_n + rate (P_n - V_n),     0 < rate < 2,

converges, and V_n converges to a solution; prox is the soft threshold gamma (trainers/certvit/prox.py). The projection
visits one mini-batch after the other (Algorithm 2; Combettes 2003). One half-space contains C and excludes W_n; another
contains C because W_n is the nearest point so far. W_{n+1} is the point of both that is nearest to W_0. The paper's eta
is absolute; here it is a share of the outputs' energy, because the layers of a ViT differ in scale. The bias b is kept.

Letters: W, U, V, P (O, I) weights; x (T, I), y (T, O) rows; J mini-batches; theta (O,) or infinite.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainers.certvit.prox import soft_threshold


@dataclass(frozen=True)
class Rows:
    """One mini-batch of a layer: inputs x (T, I) and outputs y - b (T, O).

    `theta` is None, or holds the thresholds (T, O) of the ReLU_theta after the layer. `bias` (O,) is added before it.
    Proof: docs/proofs.md#certvit-problem.
    """

    x: Tensor
    y: Tensor
    theta: Tensor | None = None
    b: Tensor | float = 0.0

    def miss(self, w: Tensor) -> Tensor:
        """Return W x + b - y minus its projection onto the subdifferential: (T, O)."""
        z = self.x @ w.mT
        if self.theta is None:
            return z - self.y
        # The nearest point of the subdifferential of y = min(max(z + b, 0), theta) is 0 inside, and z + b - y outside.
        low, high = torch.zeros_like(self.theta) - self.b, self.theta - self.b
        y = self.y.maximum(low).minimum(high)
        miss = z - y
        miss = torch.where(y <= low, miss.clamp_min(0), miss)
        return torch.where(y >= high, miss.clamp_max(0), miss)

    def share(self, w: Tensor) -> float:
        """Return mean_t d^2 / mean_t ||y_t - b||^2, which eta limits."""
        return float(self.miss(w).square().sum() / self.y.square().sum().clamp_min(torch.finfo(w.dtype).tiny))

    def excess(self, w: Tensor, eta: float) -> tuple[Tensor, Tensor]:
        """Return c_j(W) and its gradient (eq. 12-13)."""
        miss, t = self.miss(w), len(self.x)
        c = (miss.square().sum() - eta * self.y.square().sum()) / t
        return c, 2 * miss.mT @ self.x / t


def solve(
    w: Tensor, batches: Sequence[Rows], *, gamma: float, eta: float, rate: float, iterations: int, passes: int
) -> Tensor:
    """Return V after `iterations` of Douglas-Rachford from U_0 = W, each with at most `passes` over the mini-batches.

    Args:
        gamma: the soft threshold; it changes the speed but not the solution.
        rate: lambda in the paper.

    Proof: docs/proofs.md#douglas-rachford.
    """
    u = w
    for _ in range(iterations):
        v = soft_threshold(u, gamma)
        u = u + rate * (project(2 * v - u, batches, eta, passes) - v)
    return soft_threshold(u, gamma)


def project(w_0: Tensor, batches: Sequence[Rows], eta: float, passes: int, precision: float = 1e-6) -> Tensor:
    """Return the point of C nearest to w_0 (in the limit); stop when a whole pass moves it by less than `precision`.

    Proof: docs/proofs.md#surrogate-half-spaces.
    """
    w = w_0
    for _ in range(passes):
        before = w
        for rows in batches:
            c, gradient = rows.excess(w, eta)
            if c > 0:
                w = nearest(w_0, w, gradient * (c / gradient.square().sum()))
        if (w - before).norm() <= precision * w.norm():
            break
    return w


def nearest(w_0: Tensor, w: Tensor, step: Tensor) -> Tensor:
    """Return the point nearest to w_0 in two half-spaces that contain C.

    They are { v: <v - w, w_0 - w> <= 0 } and { v: <v - (w - step), step> <= 0 }. With pi = <w_0 - w, step>, mu = ||w_0
    - w||^2, nu = ||step||^2, zeta = mu nu - pi^2 (Combettes 2003, eq. 6-7).
    """
    pi, mu, nu = (float((a * b).sum()) for a, b in ((w_0 - w, step), (w_0 - w, w_0 - w), (step, step)))
    zeta = max(mu * nu - pi * pi, 0.0)
    if zeta <= 1e-12 * mu * nu or math.isclose(mu, 0.0):
        return w - step
    if pi * nu >= zeta:
        return w_0 - (1 + pi / nu) * step
    return w + (nu / zeta) * (pi * (w_0 - w) - mu * step)
