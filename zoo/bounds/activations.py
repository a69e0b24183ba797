"""Scalar activations to second order, and the rules of the element-wise modules.

Of hidden units sigma(z_h + d_h) with clean values z_h, weights w_h and |d_h| <= D_h (the reach of unit h), two
questions are answered, with R_h = sigma(z_h + d_h) - sigma(z_h) - sigma'(z_h) d_h and d a linear image of the change
eta of the input:

    how negative is  sum_h w_h R_h,      how large is  (sum_h (s_h R_h)^2)^(1/2)?

Both are led back to quadratic forms sum_h c_h d_h^2, whose largest value on the unit ball of eta, over all tokens,
is `top(c)`. For element-wise modules d = eta, and it is max c; for hidden units see `fused.py`. The change of the
image is shared among tokens: sup { sum_t psi_t(r_t) : sum r_t^2 <= r^2 } = max_t psi_t(r) where psi_t(r) / r^2 is
nondecreasing (MATH-PROOFS section 1).

Letters: B images, C classes, P pairs (class, image), N tokens, H hidden units; v >= 0 weights, k >= 0 distances.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from zoo.bounds.curvature import Expand, Expansion, curvature
from zoo.bounds.monotone import LIFT, SHRINK, MonotoneGELU
from zoo.bounds.rules import GELU_SLOPE, SILU_SLOPE, Bound, NoRule

Top = Callable[[Tensor], Tensor]  # c (P, N, H) -> (P,), never below max(0, max_tokens sup sum_h c_h d_h^2 / |eta|^2)
PAD = 1e-13  # above the rounding of sigma'' and of its extrema
FAR = 40.0  # beyond it every |sigma''| here is below PAD
PAIR_BYTES = 2**26  # memory for one array over the units of a few pairs
THRESHOLDS = tuple(2.0**i for i in range(-3, 6))  # what the search over majorants of a hinge tries


class Bend(Protocol):
    """An activation; `slope_range` is the largest difference of two slopes."""

    @property
    def slope_range(self) -> float: ...

    def slope(self, z: Tensor) -> Tensor:
        """sigma'(z); at a kink one of the two."""

    def dip(self, z_PNH: Tensor, w_PNH: Tensor, reach_PNH: Tensor, r_P: Tensor, top: Top) -> Tensor:
        """(P,) never below -sum w_h R_h, for a change of the input by r."""

    def size(self, z_PNH: Tensor, s_H: Tensor, reach_PNH: Tensor, r_P: Tensor, top: Top) -> Tensor:
        """(P,) never below (sum (s_h R_h)^2)^(1/2)."""


# smooth activations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Smooth:
    """sigma', sigma'' and the extrema of sigma'': (location, value rounded outwards). MATH-PROOFS section 2.2."""

    slope: Callable[[Tensor], Tensor]
    second: Callable[[Tensor], Tensor]
    extrema: tuple[tuple[float, float], ...]
    slope_range: float

    def dip(self, z_PNH: Tensor, w_PNH: Tensor, reach_PNH: Tensor, r_P: Tensor, top: Top) -> Tensor:
        """R_h = d_h^2 int_0^1 (1 - t) sigma''(z_h + t d_h) dt, so with [lo, hi] the range of sigma'' within the reach

            w_h R_h >= c_h d_h^2 / 2,  c_h = min(w_h lo_h, w_h hi_h):        -sum_h w_h R_h <= r^2 / 2 top(-c).

        c falls with r, hence the lemma on tokens. As r -> 0 it is the exact Hessian. MATH-PROOFS section 2.3."""
        lo, hi = hull2(self, z_PNH, reach_PNH)
        return 0.5 * top(_of_all(-r_P.square()[:, None, None] * torch.minimum(w_PNH * lo, w_PNH * hi)))

    def size(self, z_PNH: Tensor, s_H: Tensor, reach_PNH: Tensor, r_P: Tensor, top: Top) -> Tensor:
        """|R_h| <= kappa_h d_h^2 / 2, kappa = max |sigma''| within the reach, and sum x_h^2 <= max x_h sum x_h:

            sum_h (s_h R_h)^2 <= m / 4 sum_h s_h kappa_h d_h^2,    m = max_h s_h kappa_h D_h^2,

        where m, a number of the token, stands inside the form."""
        lo, hi = hull2(self, z_PNH, reach_PNH)
        kappa_PNH = s_H * torch.maximum(-lo, hi)
        m_PN1 = (kappa_PNH * reach_PNH.square()).amax(-1, keepdim=True)
        return 0.5 * r_P * top(_of_all(kappa_PNH * m_PN1)).sqrt()


def _of_all(c_PNH: Tensor) -> Tensor:
    """One form that is above those of all tokens, (P, 1, H): tokens bend alike, so it costs a radius less than 1 %, and
    N times fewer eigenvalues are asked for. (At kinks they do not: there it would cost 4 %.)"""
    return c_PNH.amax(1, keepdim=True)


def hull2(act: Smooth, z: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds (lo, hi) of sigma'' on [z - reach, z + reach]: its values at both ends and the extrema in between."""
    a, b = (z - reach).clamp(-FAR, FAR), (z + reach).clamp(-FAR, FAR)
    ends = act.second(a), act.second(b)
    lo, hi = torch.minimum(*ends), torch.maximum(*ends)
    for at, value in act.extrema:
        inside = (a <= at) & (at <= b)
        lo = torch.where(inside, lo.clamp(max=value), lo)
        hi = torch.where(inside, hi.clamp(min=value), hi)
    return lo - PAD, hi + PAD


def _phi(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z.square()) * 0.3989422804014327


def _gelu_slope(z: Tensor) -> Tensor:
    return torch.special.ndtr(z) + z * _phi(z)


def _gelu_second(z: Tensor) -> Tensor:
    return (2 - z.square()) * _phi(z)


def _tanh_gelu_u(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u = sqrt(2 / pi) (z + 0.044715 z^3) with u' and u''; the function is z (1 + tanh u) / 2."""
    k = 0.7978845608028654
    return k * (z + 0.044715 * z**3), k * (1 + 0.134145 * z.square()), k * 0.26829 * z


def _tanh_gelu_slope(z: Tensor) -> Tensor:
    u, du, _ = _tanh_gelu_u(z)
    return 0.5 * (1 + u.tanh()) + 0.5 * z * du / u.cosh().square()


def _tanh_gelu_second(z: Tensor) -> Tensor:
    u, du, ddu = _tanh_gelu_u(z)
    return (du + z * (0.5 * ddu - u.tanh() * du.square())) / u.cosh().square()


def _tanh_slope(z: Tensor) -> Tensor:
    return 1 / z.cosh().square()


def _tanh_second(z: Tensor) -> Tensor:
    return -2 * z.tanh() / z.cosh().square()


def _sigmoid_slope(z: Tensor) -> Tensor:
    return z.sigmoid() * (-z).sigmoid()


def _sigmoid_second(z: Tensor) -> Tensor:
    return -_sigmoid_slope(z) * (z / 2).tanh()


GELU = Smooth(
    _gelu_slope,
    _gelu_second,
    ((0.0, 0.7978845609), (-2.0, -0.1079819331), (2.0, -0.1079819331)),
    2 * GELU_SLOPE["none"] - 1,
)
TANH_GELU = Smooth(
    _tanh_gelu_slope,
    _tanh_gelu_second,
    ((0.0, 0.7978845609), (-2.0134807246242579, -0.1079135159), (2.0134807246242579, -0.1079135159)),
    2 * GELU_SLOPE["tanh"] - 1,
)
TANH = Smooth(
    _tanh_slope, _tanh_second, ((-0.6584789484624084, 0.7698003590), (0.6584789484624084, -0.7698003590)), 1.0
)


def _silu_slope(z: Tensor) -> Tensor:
    return z.sigmoid() + z * _sigmoid_slope(z)


def _silu_second(z: Tensor) -> Tensor:
    return _sigmoid_slope(z) * (2 - z * (z / 2).tanh())


def _softplus(act: nn.Softplus) -> Smooth:
    """sigma' = s(b z), sigma'' = b s (1 - s), s the sigmoid. For b < 1 it has not vanished at FAR, where `hull2` stops:
    what lies beyond comes from below to 0. Its rule of first order refuses a threshold that shows."""
    b = float(act.beta)
    tails = ((-FAR, -0.0), (FAR, -0.0)) if b < 1 else ()
    return Smooth(
        lambda z: (b * z).sigmoid(), lambda z: b * _sigmoid_slope(b * z), ((0.0, b / 4 * (1 + 1e-12)), *tails), 1.0
    )


def _monotone(gelu: Smooth) -> Smooth:
    """(gelu(z) + a z) / b, see monotone.py."""
    return Smooth(
        lambda z: (gelu.slope(z) + LIFT) / SHRINK,
        lambda z: gelu.second(z) / SHRINK,
        tuple((at, value / SHRINK * (1 + 1e-12)) for at, value in gelu.extrema),
        1.0,
    )


SIGMOID = Smooth(
    _sigmoid_slope, _sigmoid_second, ((-1.3169578969248166, 0.0962250449), (1.3169578969248166, -0.0962250449)), 0.25
)

SILU = Smooth(
    _silu_slope,
    _silu_second,
    ((0.0, 0.5000000001), (-3.4358409935351107, -0.0369143732), (3.4358409935351107, -0.0369143732)),
    2 * SILU_SLOPE - 1,
)


# kinks ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hinge:
    """min(max(z, 0), theta): ReLU if theta is infinite, constant if theta <= 0. sigma' = 1 for 0 < z < theta, else 0.

    Across the kink at 0 the graph bends upwards, across that at theta downwards. One of them counts for a sign of w:

        -w_h R_h <= v_h (|d_h| - k_h)_+,   v = |w|,   k = |z| for w < 0 (none beyond theta),
                                                      k = |z - theta| for w > 0 (none below 0).
    """

    theta: Tensor | float = torch.inf
    slope_range: float = 1.0

    def slope(self, z: Tensor) -> Tensor:
        return ((z > 0) & (z < self.theta)).to(z)

    def dip(self, z_PNH: Tensor, w_PNH: Tensor, reach_PNH: Tensor, r_P: Tensor, top: Top) -> Tensor:
        """MATH-PROOFS section 2.4, with the thresholds of `hinges`; and v (|d| - k)_+ <= v (1 - k/D) |d| = u |d| with

        sum_h u_h |d_h| <= ( sum_h u_h  sum_h u_h d_h^2 )^(1/2)     per token, tokens by Cauchy."""
        none = torch.full_like(z_PNH, torch.inf)
        rising = torch.where(z_PNH < self.theta, z_PNH.abs(), none)
        falling = torch.where(z_PNH > 0, (z_PNH - self.theta).abs(), none)
        v_PNH, k_PNH = w_PNH.abs() * (self.theta > 0), torch.where(w_PNH < 0, rising, falling)
        u_PNH = v_PNH * _beyond(k_PNH, reach_PNH)
        square = r_P.square()[:, None, None]
        cauchy = r_P * (top(u_PNH) * u_PNH.sum((-2, -1))).sqrt()
        return torch.minimum(hinges(v_PNH, k_PNH, reach_PNH, r_P, lambda c: top(square * c)), cauchy)

    def size(self, z_PNH: Tensor, s_H: Tensor, reach_PNH: Tensor, r_P: Tensor, top: Top) -> Tensor:
        """|R_h| <= (|d_h| - k_h)_+ <= (1 - k_h / D_h)_+ |d_h|, k the distance to the nearest kink."""
        k_PNH = torch.minimum(z_PNH.abs(), (z_PNH - self.theta).abs())
        return r_P * top(((self.theta > 0) * s_H * _beyond(k_PNH, reach_PNH)).square()).sqrt()


def _beyond(k: Tensor, reach: Tensor) -> Tensor:
    """(1 - k / D)_+, and 0 where D = 0."""
    return torch.where(reach > k, 1 - k / reach, torch.zeros_like(k))


def hinges(v: Tensor, k: Tensor, reach: Tensor, r: Tensor, form: Top) -> Tensor:
    """sup sum_h v_h (|d_h| - k_h)_+ <= min over tau of form(c) + sum_h s_h: every threshold gives a bound.

    For |d| <= D and t >= 2 k (AM-GM), and otherwise from the parabola that touches at 2 k, or through 0 and (D, D - k),

        (|d| - k)_+ <= d^2 / (2 t) + (t / 2 - k),        (|d| - k)_+ <= d^2 / (4 k),  d^2 (D - k) / D^2  if D <= 2 k.

    Units with D <= k do nothing. t_h = tau r v_h / |v|, at most D_h: for a form with equal weights that is the dual of
    the problem. The bounds grow with r, because r^2 c_h and s_h do.

    v, k, reach (..., N, H), r (...,); form(c) (..., N, H) -> (...,) bounds sum c_h d_h^2.
    """
    zero, r_11 = torch.zeros_like(v), r[..., None, None]
    share = r_11 * v / torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True).clamp_min(1e-300)
    live = (reach > k) & (v > 0)
    k = torch.where(live, k, zero)  # finite
    low = torch.where(reach > 2 * k, 1 / (4 * k), (reach - k) / reach.square())
    best = torch.full_like(r, torch.inf)
    for tau in THRESHOLDS:
        t = torch.minimum(tau * share, reach)
        lifted = (t >= 2 * k) & (t > 0)
        c = torch.where(live, v * torch.where(lifted, 1 / (2 * t), low), zero)
        s = torch.where(live & lifted, v * (t / 2 - k), zero)
        best = torch.minimum(best, form(c) + s.sum((-2, -1)))
    return best


# which module is what -------------------------------------------------------------------------------------------------

_BENDS: dict[type[nn.Module], Callable[..., Bend]] = {
    nn.GELU: lambda act: {"none": GELU, "tanh": TANH_GELU}[act.approximate],
    nn.Tanh: lambda act: TANH,
    nn.Sigmoid: lambda act: SIGMOID,
    nn.ReLU: lambda act: Hinge(),
    nn.SiLU: lambda act: SILU,
    nn.Softplus: _softplus,
    MonotoneGELU: lambda act: _monotone(GELU),
}


def bend_of(act: nn.Module) -> Bend:
    """The second order of an activation module. Raises `NoRule`."""
    if type(act) not in _BENDS:
        raise NoRule(act, "its second derivative is not tabulated")
    return _BENDS[type(act)](act)


# units around a clean batch -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """How the units depend on the input of a token, d_h = <a_h, eta>.

    lengths_H: |a_h|. scales_H: s > 0, free; R is measured as |S R|. norm: never below ||S W_1||. top: as above.
    """

    lengths_H: Tensor
    scales_H: Tensor
    norm: Tensor
    top: Top


def units_beta(bend: Bend, form: Form, z_BNH: Tensor) -> Bound:
    """|S R|, also at most slope_range ||S W_1|| r, as R = (D' - D) d with slopes D' between those of the activation."""

    def size(z_PNH: Tensor, r_P: Tensor) -> Tensor:
        reach_PNH = form.lengths_H * r_P[:, None, None]
        quadratic = bend.size(z_PNH, form.scales_H, reach_PNH, r_P, form.top)
        return torch.minimum(quadratic, bend.slope_range * form.norm * r_P)

    return lambda r: _in_chunks(size, r, z_BNH)


def units_remainder(bend: Bend, form: Form, z_BNH: Tensor, w_CBNH: Tensor) -> Bound:
    """-sum w_h R_h, which is also at most |S^{-1} w| |S R|."""

    def dip(z_PNH: Tensor, r_P: Tensor, w_PNH: Tensor) -> Tensor:
        reach_PNH = form.lengths_H * r_P[:, None, None]
        quadratic = bend.dip(z_PNH, w_PNH, reach_PNH, r_P, form.top)
        weight_P = torch.linalg.vector_norm((w_PNH / form.scales_H).flatten(1), dim=-1)
        return torch.minimum(quadratic, bend.slope_range * form.norm * weight_P * r_P)

    return lambda r: _in_chunks(dip, r.expand(torch.broadcast_shapes(r.shape, w_CBNH.shape[:2])), z_BNH, w_CBNH)


def _in_chunks(value: Callable[..., Tensor], r: Tensor, *units: Tensor) -> Tensor:
    """value(z, r, ...) for every entry of r (..., B) or (..., C, B), a few pairs at a time; 0 at 0, and infinity stays
    infinity."""
    z_BNH = units[0]
    flat = [unit.flatten(0, -3) for unit in units]
    r_P = r.flatten()
    few = max(1, PAIR_BYTES // (8 * z_BNH[0].numel()))
    value_P = torch.zeros_like(r_P)
    for p in (r_P > 0).nonzero().flatten().split(few):
        z, *rest = (unit[p % len(unit)] for unit in flat)
        value_P[p] = value(z, r_P[p].clamp(max=1e100), *rest)
    return torch.where(torch.isinf(r_P) & (value_P > 0), r_P, value_P).view(r.shape)


# element-wise modules -------------------------------------------------------------------------------------------------


def elementwise(module: nn.Module, bend: Bend) -> Expand:
    """Every entry is a unit of its own, d = eta."""

    def largest(c_PNH: Tensor) -> Tensor:
        return c_PNH.amax((-2, -1)).clamp_min(0)

    def expand(x: Tensor) -> Expansion:
        one, z_B1H = x.new_ones(()), x.flatten(1).unsqueeze(1)
        form, slope = Form(one, one, one, largest), bend.slope(z_B1H).view(x.shape)
        return Expansion(
            module(x),
            slope.abs().flatten(1).amax(1),
            units_beta(bend, form, z_B1H),
            lambda g: units_remainder(bend, form, z_B1H, g.flatten(2).unsqueeze(2)),
            lambda g: g * slope,
            lambda v: v * slope,
        )

    return expand


@curvature(nn.GELU, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.Softplus, MonotoneGELU)
def activation(module: nn.Module) -> Expand:
    """One unit per entry."""
    return elementwise(module, bend_of(module))
