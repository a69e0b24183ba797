"""Scalar activations: their slopes, and how far they are from their linearisation.

For hidden units sigma(z_h + d_h) with clean values z_h, weights w_h and |d_h| <= D_h (the reach of unit h), let R_h =
sigma(z_h + d_h) - sigma(z_h) - sigma'(z_h) d_h, with d a linear image of the change eta of the input. This file bounds

    how negative is  sum_h w_h R_h,      how large is  (sum_h (s_h R_h)^2)^(1/2)?

Both reduce to quadratic forms sum_h c_h d_h^2, whose largest value on the unit ball of eta, over all tokens, is
`lambda_max(c)`. elementwise.py computes it for element-wise modules, where d = eta, fused.py for hidden units. The
change of the image is shared among tokens: sup { sum_t psi_t(r_t) : sum r_t^2 <= r^2 } = max_t psi_t(r) where psi_t(r)
/ r^2 is nondecreasing (docs/proofs.md#tokenwise-lemma). torch_modules.py says which module is which activation.

Letters: P pairs (class, image), N tokens, H hidden units; v >= 0 weights, k >= 0 distances.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.bounds.contracts import Activation, LambdaMax
from zoo.bounds.rule_table import NoRule, rules_of

PIECES = 5  # into which the way from z to z + d is cut
PAD = 1e-13  # above the rounding of sigma'' and of its extrema
FAR = 40.0  # beyond it every |sigma''| here is below PAD
TYPICAL = 0.35  # share of its reach that a unit is assumed to change by, where any choice is sound
THRESHOLDS = tuple(2.0**i for i in range(-3, 6))  # tried by the search over majorants of a hinge


def activation_of(module: nn.Module) -> Activation:
    """Return the known properties of an activation module. Raises `NoRule`."""
    activation = rules_of(module).activation
    if activation is None:
        raise NoRule(module, "its slopes and its second derivative are not tabulated")
    return activation(module)


def lipschitz(activation: Activation) -> float:
    """Return the largest |slope|."""
    least, most = activation.slopes
    return max(-least, most)


def slope_range(activation: Activation) -> float:
    """Return the largest difference of two slopes."""
    least, most = activation.slopes
    return most - least


# smooth activations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Smooth:
    """sigma', sigma'' and the extrema of sigma'' as (location, value rounded outwards). docs/proofs.md#hull.

    `steepest` is never below |sigma'''| and `most_fourth` never below |sigma''''|; infinite where sigma'' jumps.
    """

    slope: Callable[[Tensor], Tensor]
    second: Callable[[Tensor], Tensor]
    extrema: tuple[tuple[float, float], ...]
    slopes: tuple[float, float]
    operations: int | None = None
    steepest: float = math.inf
    most_fourth: float = math.inf

    def third(self, z: Tensor) -> Tensor:
        """Return sigma''', as torch differentiates sigma''."""
        with torch.enable_grad():
            z = z.detach().requires_grad_(True)
            (found,) = torch.autograd.grad(self.second(z).sum(), z)
        return found

    def remainder(self, z_PNH: Tensor, w_PNH: Tensor, reach_PNH: Tensor, r_P: Tensor, lambda_max: LambdaMax) -> Tensor:
        """Bound the remainder R_h = d_h^2 int_0^1 (1 - t) sigma''(z_h + t d_h) dt.

        With [lo, hi] the range of sigma'' within the reach,

            w_h R_h >= c_h d_h^2 / 2,  c_h = min(w_h lo_h, w_h hi_h):        -sum_h w_h R_h <= r^2 / 2 lambda_max(-c).

        c falls with r, so the lemma on tokens applies. As r -> 0 the bound tends to the exact Hessian.
        docs/proofs.md#fused-mlp.
        """
        lo, hi = range_of_second(self, z_PNH, reach_PNH)
        return 0.5 * lambda_max(_of_all(-r_P.square()[:, None, None] * torch.minimum(w_PNH * lo, w_PNH * hi)))

    def beta(self, z_PNH: Tensor, s_H: Tensor, reach_PNH: Tensor, r_P: Tensor, lambda_max: LambdaMax) -> Tensor:
        """Bound |R_h| <= kappa_h d_h^2 / 2, kappa = max |sigma''| within the reach.

        As sum x_h^2 <= max x_h sum x_h,

            sum_h (s_h R_h)^2 <= m / 4 sum_h s_h kappa_h d_h^2,    m = max_h s_h kappa_h D_h^2,

        where m, a number of the token, stands inside the form.
        """
        lo, hi = range_of_second(self, z_PNH, reach_PNH)
        kappa_PNH = s_H * torch.maximum(-lo, hi)
        m_PN1 = (kappa_PNH * reach_PNH.square()).amax(-1, keepdim=True)
        return 0.5 * r_P * lambda_max(_of_all(kappa_PNH * m_PN1)).sqrt()

    def parabola(self, z: Tensor, w: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parabola of the curvature; its constant is 0."""
        lo, hi = range_of_mean_second(self, z, reach)
        c = (-torch.minimum(w * lo, w * hi)).clamp_min(0)
        return c, torch.zeros_like(c)

    def chord(self, z: Tensor, reach: Tensor) -> Tensor:
        """Return kappa D / 2, or the range of slopes if that is less."""
        lo, hi = range_of_mean_second(self, z, reach)
        return (0.5 * torch.maximum(-lo, hi) * reach).clamp_max(slope_range(self))


def _of_all(c_PNH: Tensor) -> Tensor:
    """Return one form (P, 1, H) that is above those of all tokens.

    The forms of tokens are similar, so this costs less than 1 % of a radius, and needs N times fewer eigenvalues. At
    kinks they differ: there it would cost 4 %, and is not used.
    """
    return c_PNH.amax(1, keepdim=True)


def range_of_second(act: Smooth, z: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    """Return bounds (lo, hi) of sigma'' on [z - reach, z + reach].

    They are its values at both ends and at the extrema in between. Proof: docs/proofs.md#hull.
    """
    a, b = (z - reach).clamp(-FAR, FAR), (z + reach).clamp(-FAR, FAR)
    ends = act.second(a), act.second(b)
    lo, hi = torch.minimum(*ends), torch.maximum(*ends)
    for at, value in act.extrema:
        inside = (a <= at) & (at <= b)
        lo = torch.where(inside, lo.clamp(max=value), lo)
        hi = torch.where(inside, hi.clamp(min=value), hi)
    return lo - PAD, hi + PAD


def range_of_mean_second(act: Smooth, z: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    """Return bounds (lo, hi) of 2 R / d^2 for |d| <= reach, R the remainder of second order.

    This is the mean of sigma''(z + t d) over 0 <= t <= 1 with weights 2 (1 - t), which are largest where t d is small.

    Proof: docs/proofs.md#mean-hull.
    """
    lo, hi, before = torch.zeros_like(z), torch.zeros_like(z), 0.0
    for t in (k / PIECES for k in range(1, PIECES + 1)):
        weight, before = 2 * t - t**2 - before, 2 * t - t**2
        lo_t, hi_t = range_of_second(act, z, t * reach)
        lo, hi = lo + weight * lo_t, hi + weight * hi_t
    return lo, hi


# kinks ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hinge:
    """min(max(z, 0), theta): ReLU if theta is infinite, constant if theta <= 0. sigma' = 1 for 0 < z < theta, else 0.

    The kink at 0 is convex, the kink at theta concave. For each sign of w one of them matters:

        -w_h R_h <= v_h (|d_h| - k_h)_+,   v = |w|,   k = |z| for w < 0 (none beyond theta),
                                                      k = |z - theta| for w > 0 (none below 0).
    """

    theta: Tensor | float = torch.inf
    slopes: tuple[float, float] = (0.0, 1.0)
    operations: int | None = 0

    def slope(self, z: Tensor) -> Tensor:
        """Return 1 between the kinks, else 0."""
        return ((z > 0) & (z < self.theta)).to(z)

    def remainder(self, z_PNH: Tensor, w_PNH: Tensor, reach_PNH: Tensor, r_P: Tensor, lambda_max: LambdaMax) -> Tensor:
        """Bound the remainder by docs/proofs.md#kinks with the thresholds of `hinges`, or by Cauchy-Schwarz.

        The latter uses v (|d| - k)_+ <= v (1 - k/D) |d| = u |d| with

            sum_h u_h |d_h| <= ( sum_h u_h  sum_h u_h d_h^2 )^(1/2)     per token, and Cauchy-Schwarz over tokens.
        """
        v_PNH, k_PNH = self._kink(z_PNH, w_PNH)
        u_PNH = v_PNH * beyond(k_PNH, reach_PNH)
        square = r_P.square()[:, None, None]
        cauchy = r_P * (lambda_max(u_PNH) * u_PNH.sum((-2, -1))).sqrt()

        def form(c_TPNH: Tensor) -> Tensor:
            return lambda_max((square * c_TPNH).flatten(0, 1)).view(c_TPNH.shape[:2])

        return torch.minimum(hinges(v_PNH, k_PNH, reach_PNH, r_P, form), cauchy)

    def beta(self, z_PNH: Tensor, s_H: Tensor, reach_PNH: Tensor, r_P: Tensor, lambda_max: LambdaMax) -> Tensor:
        """Bound |R_h| <= (|d_h| - k_h)_+ <= (1 - k_h / D_h)_+ |d_h|, k the distance to the nearest kink."""
        return r_P * lambda_max((s_H * self.chord(z_PNH, reach_PNH)).square()).sqrt()

    def parabola(self, z: Tensor, w: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parabola of the one kink that matters."""
        return hinge_parabola(*self._kink(z, w), reach)

    def chord(self, z: Tensor, reach: Tensor) -> Tensor:
        """Return (1 - k / D)_+, k the distance to the nearest kink."""
        return (self.theta > 0) * beyond(torch.minimum(z.abs(), (z - self.theta).abs()), reach)

    def _kink(self, z: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return v and k."""
        none = torch.full_like(z, torch.inf)
        rising = torch.where(z < self.theta, z.abs(), none)
        falling = torch.where(z > 0, (z - self.theta).abs(), none)
        return w.abs() * (self.theta > 0), torch.where(w < 0, rising, falling)


def hinge_parabola(v: Tensor, k: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    """Return (c, s) with v (|d| - k)_+ <= c d^2 / 2 + s for |d| <= D.

    These are the parabolas of `hinges` with t = TYPICAL D: the line that touches the concave envelope over d^2 in [0,
    D^2] at a change of that size.
    """
    live = (reach > k) & (v > 0)
    k = torch.where(live, k, torch.zeros_like(k))  # finite
    t = (TYPICAL * reach).clamp_min(1e-100)
    lifted = t >= 2 * k
    low = torch.where(reach > 2 * k, 1 / (2 * k), 2 * (reach - k) / reach.square())
    c = torch.where(live, v * torch.where(lifted, 1 / t, low), 0.0)
    return c, torch.where(live & lifted, v * (t / 2 - k), 0.0)


def beyond(k: Tensor, reach: Tensor) -> Tensor:
    """Return (1 - k / D)_+, and 0 where D = 0."""
    return torch.where(reach > k, 1 - k / reach, torch.zeros_like(k))


def hinges(v: Tensor, k: Tensor, reach: Tensor, r: Tensor, form: LambdaMax) -> Tensor:
    """Bound sup sum_h v_h (|d_h| - k_h)_+ by the least of form(c) + sum_h s_h over tau: every threshold gives a bound.

    For |d| <= D and t >= 2 k (AM-GM), and otherwise from the parabola that touches at 2 k, or through 0 and (D, D - k),

        (|d| - k)_+ <= d^2 / (2 t) + (t / 2 - k),        (|d| - k)_+ <= d^2 / (4 k),  d^2 (D - k) / D^2  if D <= 2 k.

    Units with D <= k contribute nothing. t_h = tau r v_h / |v|, at most D_h: for a form with equal weights that is the
    dual of the problem. The bounds grow with r, because r^2 c_h and s_h do.

    v, k, reach (..., N, H), r (...,); form(c) (T, ..., N, H) -> (T, ...) bounds sum c_h d_h^2, for all tau at once.
    """
    zero, r_11 = torch.zeros_like(v), r[..., None, None]
    share = r_11 * v / torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True).clamp_min(1e-300)
    live = (reach > k) & (v > 0)
    k = torch.where(live, k, zero)  # finite
    low = torch.where(reach > 2 * k, 1 / (4 * k), (reach - k) / reach.square())
    tau = torch.tensor(THRESHOLDS).to(v).view(-1, *(1 for _ in v.shape))
    t = torch.minimum(tau * share, reach)
    lifted = (t >= 2 * k) & (t > 0)
    c = torch.where(live, v * torch.where(lifted, 1 / (2 * t), low), zero)
    s = torch.where(live & lifted, v * (t / 2 - k), zero)
    return (form(c) + s.sum((-2, -1))).amin(0)
