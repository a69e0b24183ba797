"""Quadratic forms of normalisations that divide a token by a function of its length. Proof: docs/proofs.md#norm-forms.

For one token u (d,), n = u / |u|, let t be its divisor: |u| outside of the sphere that LayerProject projects on, (|u|^2
+ R^2)^(1/2) for the bounded normalisation. With four functions of the change eta,

    a = <u, eta> / t^2,   b^2 = |eta|^2 / t^2 - a^2,   w = <g - |u|^2 / t^2 <n, g> n, eta> / t,   s^2 = (1 + a)^2 + b^2,

the remainder has a closed form, not a series. Where u + eta ends outside of the sphere (for the bounded normalisation
everywhere),

    -<g, R> / R = <g, u> / t alpha b^2 + beta w (2 a + a^2 + b^2),      alpha = 1 / (s (s + 1 + a)),
    |R|^2 / R^2 <= b^2 (alpha^2 b^2 + beta^2 (2 a + a^2 + b^2)^2),      beta = 1 / (s (s + 1)).

The reach of <n, eta> and the length of eta keep s within bounds. Squares and products of functionals remain: a 2 x 2
matrix in the plane of n and g, and a multiple of the identity off it.

Letters: B inputs, C gradients; reach (B, ..., d + 2), of the coordinates of eta, of <n, eta> and of |eta|.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from zoo.arithmetic import at_least_near, gamma, length, product
from zoo.bounds.activations import beyond, hinge_parabola
from zoo.bounds.contracts import QuadraticForm, SignedForm
from zoo.bounds.elementwise import largest_share

PAD = 1e-12  # relative: above the rounding of a form, and of a degenerate plane
HALF_CURVATURE = 0.42932510  # of N_1: half its largest second derivative (docs/proofs.md#bounded-normalisation)


@dataclass(frozen=True)
class Plane:
    """The plane of g and n, g = along n + across m with unit vectors n and m, for every token.

    Vectors are (C, B, ..., d), numbers (C, B, ..., 1).
    """

    g: Tensor
    n: Tensor
    m: Tensor
    along: Tensor
    across: Tensor
    length: Tensor

    @classmethod
    def of(cls, g: Tensor, n: Tensor) -> "Plane":
        along, length = _dot(g, n), _length(g)
        rest = g - along * n
        rest = rest - _dot(rest, n) * n  # repeated for accuracy
        across = _length(rest)
        flat = across <= 1e-13 * length  # g is along n and there is no plane: PAD is above what is dropped
        m = torch.where(flat, 0.0, rest / across.clamp_min(1e-300))
        return cls(g, n, m, along, torch.where(flat, 0.0, across), length)


@dataclass(frozen=True)
class TokenRange:
    """The reaches of a token's change: its coordinates (`axes`), its length (`size`), its part along n (`line`)."""

    axes: Tensor
    size: Tensor
    line: Tensor

    @classmethod
    def of(cls, reach: Tensor) -> "TokenRange":
        axes, line, size = at_least_near(reach).tensor_split([reach.shape[-1] - 2, reach.shape[-1] - 1], -1)
        size = torch.minimum(size, _length(axes))
        return cls(axes, size, torch.minimum(line, size))


@dataclass(frozen=True)
class TokenForm:
    """<eta, C eta> / 2 + constant: `plain` off the plane, [[along, mixed], [mixed, across]] in it. (C, B, ..., 1)."""

    plain: Tensor
    along: Tensor
    mixed: Tensor
    across: Tensor
    constant: Tensor

    @classmethod
    def round(cls, c: Tensor, constant: Tensor) -> "TokenForm":
        """Return c times the identity."""
        return cls(c, c, torch.zeros_like(c), c, constant)

    @property
    def top(self) -> Tensor:
        """The largest eigenvalue."""
        mean, spread = self._eigenvalues
        return torch.maximum(self.plain, mean + spread)

    @property
    def absolute(self) -> Tensor:
        """An upper bound of the norm of what `times` adds up, between two projections: (C, B)."""
        parts = torch.stack(torch.broadcast_tensors(self.plain, self.along, self.mixed, self.across)).abs()
        return 32 * parts.amax(0).flatten(2).amax(2)

    def positive(self) -> "TokenForm":
        """Return the positive part.

        For a matrix M with eigenvalues p > q it is x M + y with x p + y = p^+, x q + y = q^+.
        """
        mean, spread = self._eigenvalues
        more, less = (mean + spread).clamp_min(0), (mean - spread).clamp_min(0)
        x = ((more - less) / (2 * spread).clamp_min(1e-300)).clamp(max=1)
        y = more - x * (mean + spread)
        return TokenForm(
            self.plain.clamp_min(0), x * self.along + y, x * self.mixed, x * self.across + y, self.constant
        )

    @property
    def size(self) -> Tensor:
        """The norm."""
        mean, spread = self._eigenvalues
        return torch.maximum(self.plain.abs(), mean.abs() + spread)

    def only(self, where: Tensor) -> "TokenForm":
        """Restrict the form to `where`. Elsewhere it is not a bound, so its cost is infinite."""
        constant = torch.where(where, self.constant, torch.inf)
        return TokenForm(self.plain, self.along, self.mixed, self.across, constant)

    def or_cheaper(self, other: "TokenForm", size: Tensor) -> "TokenForm":
        """Choose the cheaper form token by token, for a change of the largest allowed length. NaN is never chosen."""
        return self.replaced(other.cost(size) < self.cost(size), other)

    def replaced(self, where: Tensor, other: "TokenForm") -> "TokenForm":
        """Return the other form where `where` is True."""
        pairs = zip(astuple(other), astuple(self), strict=True)
        return TokenForm(*(torch.where(where, new, old) for new, old in pairs))

    def times(self, eta: Tensor, plane: Plane) -> Tensor:
        """Return C eta."""
        x, y = _dot(eta, plane.n), _dot(eta, plane.m)
        on_n = (self.along - self.plain) * x + self.mixed * y
        on_m = self.mixed * x + (self.across - self.plain) * y
        return self.plain * eta + on_n * plane.n + on_m * plane.m

    @property
    def _eigenvalues(self) -> tuple[Tensor, Tensor]:
        """The eigenvalues in the plane: their mean, and their distance from it."""
        return (self.along + self.across) / 2, torch.hypot((self.along - self.across) / 2, self.mixed)

    def cost(self, size: Tensor) -> Tensor:
        """Return the largest value for a change of this length."""
        return product(self.top / 2, size.square()) + self.constant


@dataclass(frozen=True)
class Factors:
    """The bounds that the reach implies for a, |eta| / t, alpha and beta, where |a| stays below 1 (`near`)."""

    near: Tensor
    a: Tensor
    change: Tensor
    alpha: tuple[Tensor, Tensor]
    beta: tuple[Tensor, Tensor]

    @property
    def square(self) -> Tensor:
        """A factor with |R|^2 / R^2 <= square |eta|^2 / t^2, from the equation at the head of this file."""
        return (self.alpha[1] * self.change).square() + (self.beta[1] * (2 * self.a + self.change.square())).square()


def _same(v: Tensor) -> Tensor:
    return v


@dataclass(frozen=True)
class NormForms:
    """Forms (see `Forms`) of a map outer o N o inner with N(u + eta) = N(u) + J eta + r around u.

    `inner` is a symmetric projection that does not change u and r. u (B, ..., d).
    """

    u: Tensor
    radius: float
    inner: Callable[[Tensor], Tensor] = _same
    outer: Callable[[Tensor], Tensor] = _same
    outer_T: Callable[[Tensor], Tensor] = _same
    spread_rounding: float = 0.0

    @property
    def shared(self) -> bool:
        return False

    @property
    def sizes(self) -> Tensor:
        return self.u.new_ones(())

    @property
    def slack(self) -> Tensor:
        return self.u.new_ones(()) * self._terms

    @property
    def _terms(self) -> float:
        """The rounding of a few sums over the width."""
        return gamma(8 * self.u.shape[-1] + 64)

    def squares(self, probes: Tensor) -> Tensor:
        eta = self.inner(probes)
        line = _dot(eta, self._n).square().sum(0)
        return torch.cat([eta.square().sum(0), line, torch.full_like(line, torch.inf)], -1)

    def of_gradient(self, g: Tensor, reach: Tensor) -> QuadraticForm:
        plane = Plane.of(self.outer_T(g), self._n)
        return self._along(self._of_tokens(plane, TokenRange.of(reach)), plane)

    def of_rest(self, reach: Tensor, weight: Tensor) -> QuadraticForm:
        c = weight.square().amax(-1, keepdim=True) * self._of_rest(TokenRange.of(reach))
        largest = c.flatten(1).amax(1)[None]
        return QuadraticForm(lambda v: self.inner(c * self.inner(v)), largest, rounding=self._terms * 4 * largest)

    def signed(self, g: Tensor, reach: Tensor) -> SignedForm:
        """Take the form of `of_gradient` where the third order is unknown, or exceeds that and the second order."""
        plane, found = Plane.of(self.outer_T(g), self._n), TokenRange.of(reach)
        form, third = self._of_tokens(plane, found), self._third(found)
        more = plane.length * torch.where(third.isfinite(), third, 0.0)
        exact = self._second_order(plane, more)
        small = (more <= exact.size / 2) | (more * found.size.square() / 2 <= form.cost(found.size))
        form = form.replaced(third.isfinite() & small, exact)
        absolute = TokenForm.round(form.size, form.constant)
        bound = self._along(absolute, plane)
        return SignedForm(replace(self._along(form, plane), largest=bound.largest), bound)

    def _second_order(self, plane: Plane, more: Tensor) -> TokenForm:
        """Return minus the second derivative, and `more` times the identity.

        With a = <u, eta> / t^2, D^2 N[eta, eta] / R = 3 a^2 u / t - |eta|^2 u / t^3 - 2 a eta / t.
        """
        bend, more = (
            self._bend * self._rho / self._divisor**3,
            more + PAD * plane.length * self._bend / self._divisor**2,
        )
        plain, along = bend * plane.along + more, 3 * self._omega * bend * plane.along + more
        return TokenForm(plain, along, bend * plane.across, plain, torch.zeros_like(plain))

    def _along(self, form: TokenForm, plane: Plane) -> QuadraticForm:
        largest_CB, constant_CB = form.top.flatten(2).amax(2), form.constant.flatten(2).sum(2)
        return QuadraticForm(
            lambda v: self.inner(form.times(self.inner(v), plane)), largest_CB, constant_CB, self._terms * form.absolute
        )

    @property
    def pooled(self) -> int:
        return 1

    def size(self, reach: Tensor) -> Tensor:
        reaches = TokenRange.of(reach)
        return (self._of_rest(reaches).sqrt() * reaches.size * self.u.shape[-1] ** -0.5).expand(self.u.shape)

    def shrink(self, small: Tensor, large: Tensor) -> Tensor:
        return largest_share(self._of_rest(TokenRange.of(small)), self._of_rest(TokenRange.of(large)))

    def spread(self, r: Tensor) -> Tensor:
        return self.outer(r)

    def collect(self, g: Tensor) -> Tensor:
        return self.outer_T(g)

    def _of_tokens(self, plane: Plane, reach: TokenRange) -> TokenForm:
        raise NotImplementedError

    def _of_rest(self, reach: TokenRange) -> Tensor:
        """Return c (B, ..., 1), nondecreasing in the reach, with |r|^2 <= c |eta|^2 for every token."""
        raise NotImplementedError

    @property
    def _bend(self) -> Tensor | float:
        """The radius R, which is the size of D^2 N, or 0 where N is linear."""
        return self.radius

    def _third(self, reach: TokenRange) -> Tensor:
        """Return c (B, ..., 1) with |r - D^2 r / 2| <= c |eta|^2 / 2: R x / (t^2 (1 - x)) for x = reach / t < 1.

        Proof: docs/proofs.md#third-norms.
        """
        x = reach.size / self._divisor
        near = x < 1 - PAD
        x = torch.where(near, x, 0.0)
        return torch.where(near, self.radius * x / (self._divisor.square() * (1 - x)) * (1 + PAD), torch.inf)

    @property
    def _divisor(self) -> Tensor:
        """The divisor t (B, ..., 1)."""
        raise NotImplementedError

    @property
    def _omega(self) -> Tensor:
        """1 - |u|^2 / t^2."""
        raise NotImplementedError

    @property
    def _n(self) -> Tensor:
        return torch.where(self._rho > 1e-300, self.u / self._rho.clamp_min(1e-300), 0.0)

    @property
    def _rho(self) -> Tensor:
        return _length(self.u)

    def _factors(self, reach: TokenRange) -> Factors:
        """Bound the factors: s >= 1 + a, and s t is at least the R of the sphere, or of the coordinate N_R drops."""
        t = self._divisor
        a, change = reach.line * self._rho / t.square(), reach.size / t
        near = a < 1
        a = torch.where(near, a, 0.0)
        low, high = torch.maximum(1 - a, (self.radius / t).clamp(max=1)), torch.hypot(1 + a, change)
        alpha = 1 / (high * (high + 1 + a)), 1 / (low * (low + 1 - a))
        return Factors(near, a, change, alpha, (1 / (high * (high + 1)), 1 / (low * (low + 1))))

    def _curved(self, plane: Plane, reach: TokenRange) -> TokenForm:
        """Return the form of the equation above, for changes that end outside of the sphere and do not come near it."""
        t, f, omega = self._divisor, self._factors(reach), self._omega
        lever = self._rho / t.square()  # a = lever <n, eta>
        bend = plane.along * self._rho / t**3 * torch.where(plane.along > 0, f.alpha[1], f.alpha[0])
        middle, half = (f.beta[1] + f.beta[0]) / 2, (f.beta[1] - f.beta[0]) / 2
        cross, lift = lever * plane.across / t, self._lift(plane, reach, f)
        straight = 2 * lever * omega / t * (middle * plane.along + half * plane.along.abs())
        parts = (bend + lift, omega * bend + straight + half * cross + lift, middle * cross, bend + half * cross + lift)
        plain, along, mixed, over = (2 * self.radius * part for part in parts)
        return TokenForm(plain, along, mixed, over, torch.zeros_like(lift)).positive().only(f.near)

    def _turned(self, reach: TokenRange) -> Tensor:
        """Return c of `_of_rest` for changes that do not come near the sphere.

        It is the least of three bounds: the equation above, the second derivative along the way
        (docs/proofs.md#bounded-normalisation), and 1, as 0 <= J <= I.
        """
        f, share = self._factors(reach), (self.radius / self._divisor).square()
        second = torch.where(f.change < 1, f.change / (1 - f.change), torch.inf).square() / 3
        return (share * torch.minimum(torch.where(f.near, f.square, torch.inf), second)).clamp(max=1)

    def _lift(self, plane: Plane, reach: TokenRange, f: Factors) -> Tensor:
        """Bound beta |w| |eta|^2 / t^2 with |w| within the reach, and all rounding."""
        t = self._divisor
        g = plane.g - (1 - self._omega) * plane.along * plane.n
        w = torch.minimum(product(g.abs(), reach.axes).sum(-1, keepdim=True), product(_length(g), reach.size)) / t
        return (f.beta[1] * w + PAD * plane.length * (1 + f.alpha[1] + f.beta[1])) / t.square()


class BoundedForms(NormForms):
    """Forms of u R / (|u|^2 + R^2)^(1/2)."""

    @property
    def _divisor(self) -> Tensor:
        return torch.hypot(self._rho, torch.full_like(self._rho, self.radius))

    @property
    def _omega(self) -> Tensor:
        return (self.radius / self._divisor).square()

    def _of_tokens(self, plane: Plane, reach: TokenRange) -> TokenForm:
        """Return the cheapest form: the equation above, half the largest second derivative anywhere, or |g| |eta|.

        The last one holds as 0 <= J <= I everywhere.
        """
        flat = 2 * HALF_CURVATURE / self.radius * plane.length
        straight = TokenForm.round(*hinge_parabola(plane.length, torch.zeros_like(reach.size), reach.size))
        form = TokenForm.round(flat, torch.zeros_like(flat)).or_cheaper(straight, reach.size)
        return form.or_cheaper(self._curved(plane, reach), reach.size)

    def _of_rest(self, reach: TokenRange) -> Tensor:
        return torch.minimum(self._turned(reach), (HALF_CURVATURE / self.radius * reach.size).square())


class ProjectForms(NormForms):
    """Forms of u R / max(|u|, R).

    With k = | |u| - R |,

        |u| <= R    r = (R - |y|)_+ y / |y|   at y = u + eta
        |u| > R     the equation above where y ends outside, and r = (<n, eta> + k) n + k / |u| (eta - <n, eta> n)
                    with <n, eta> <= -k where it ends inside.
    """

    @property
    def _divisor(self) -> Tensor:
        return self._rho.clamp_min(self.radius)

    @property
    def _omega(self) -> Tensor:
        return torch.zeros_like(self._rho)

    @property
    def _inside(self) -> Tensor:
        return self._rho <= self.radius

    @property
    def _k(self) -> Tensor:
        return (self._rho - self.radius).abs()

    @property
    def _bend(self) -> Tensor:
        return torch.where(self._inside, 0.0, self.radius)

    def _third(self, reach: TokenRange) -> Tensor:
        """As above where a change stays outside of the sphere, 0 where it stays inside, and else infinite."""
        inside = torch.where(self._comes_out(reach), torch.inf, 0.0)
        outside = torch.where(reach.line < self._k, super()._third(reach), torch.inf)
        return torch.where(self._inside, inside, outside)

    def _comes_out(self, reach: TokenRange) -> Tensor:
        """Return where |u + eta|^2 = |u|^2 + 2 <u, eta> + |eta|^2 can exceed R^2."""
        most = self._rho.square() + 2 * product(self._rho, reach.line) + reach.size.square()
        return most > self.radius**2 * (1 - PAD)

    def _of_tokens(self, plane: Plane, reach: TokenRange) -> TokenForm:
        """Return the cheapest form of -<g, r>, which is at most |g| |eta| in any case.

        For a token inside it is <g, y>^+ / |y| (|y| - R)_+ where |y| >= R. There (|y| - R)_+ <= (|eta| - k)_+, or
        (|y|^2 - R^2)_+ / 2R: a hinge of <n, eta> and |eta|^2 / 2R.
        """
        inside, zero = self._inside, torch.zeros_like(reach.size)
        change = product(plane.g.abs(), reach.axes).sum(-1, keepdim=True)
        most = plane.along * self._rho + torch.minimum(change, product(plane.length, reach.size))
        weight = torch.minimum(plane.length, most.clamp_min(0) / self.radius) * self._comes_out(reach)
        weight = torch.where(inside, weight, plane.length)
        form = TokenForm.round(*hinge_parabola(weight, torch.where(inside, self._k, zero), reach.size))
        lever, k = self._rho / self.radius, (self.radius**2 - self._rho.square()) / (2 * self._rho)
        c, s = hinge_parabola(weight * lever, k.clamp_min(0), reach.line)
        plain = weight / self.radius
        split = TokenForm(plain, plain + c, torch.zeros_like(c), plain.expand_as(c), s)
        form = form.or_cheaper(split.only(inside), reach.size)
        clear = reach.line < self._k
        form = form.or_cheaper(self._curved(plane, reach).only(~inside & clear), reach.size)
        return form.or_cheaper(self._through(plane, reach).only(~inside & ~clear), reach.size)

    def _through(self, plane: Plane, reach: TokenRange) -> TokenForm:
        """Bound both a change that ends outside and one that ends inside."""
        f, rho = self._factors(reach), self._divisor
        lift, ahead = self._lift(plane, reach, f), plane.along.clamp_min(0)
        plain = 2 * self.radius * (ahead * f.alpha[1] / rho.square() + lift)
        cross = plane.across * torch.maximum(2 * self.radius * f.beta[1] / rho.square(), 1 / rho)
        c, s = hinge_parabola(ahead, self._k, reach.line)
        along = 2 * self.radius * lift + cross + c
        return TokenForm(plain, along, torch.zeros_like(along), plain + cross, s).only(f.near)

    def _of_rest(self, reach: TokenRange) -> Tensor:
        """Return c for tokens inside and outside of the sphere.

        For a token inside, the bound is (1 - k / D)_+ |eta|, or |eta|^2 / 2R as long as <n, eta> alone does not lead
        out. For a token outside whose change may end inside, it also covers (|<n, eta>| - k)_+ along n and k / |u|
        |eta| across.
        """
        f, rho, k = self._factors(reach), self._divisor, self._k
        share = torch.where(f.near, (self.radius / rho).square() * f.square, torch.inf)
        through = torch.maximum(torch.maximum(share, (k / rho).square()), beyond(k, reach.line).square()).clamp(max=1)
        outside = torch.where(reach.line < k, self._turned(reach), through)
        leads_out = 2 * product(self._rho, reach.line) > self.radius**2 - self._rho.square()
        slight = torch.where(leads_out, torch.inf, reach.size / (2 * self.radius))
        inside = (torch.minimum(beyond(k, reach.size), slight) * self._comes_out(reach)).square()
        return torch.where(self._inside, inside, outside)


def _dot(v: Tensor, w: Tensor) -> Tensor:
    return (v * w).sum(-1, keepdim=True)


def _length(v: Tensor) -> Tensor:
    return length(v).unsqueeze(-1)
