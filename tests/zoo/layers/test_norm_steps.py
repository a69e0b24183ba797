"""The steps of the proof of the forms of normalisations (docs/proofs.md#norm-forms), one by one, at random tokens.

Letters: T tokens, d width.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zoo.layers.norm_forms import BoundedForms, NormForms, Plane, ProjectForms, TokenRange

T, D, R = 4000, 3, 1.3


def dot(v: Tensor, w: Tensor) -> Tensor:
    return (v * w).sum(-1, keepdim=True)


def length(v: Tensor) -> Tensor:
    return v.norm(dim=-1, keepdim=True)


def bounded(u: Tensor) -> Tensor:
    return u * R / (u.square().sum(-1, keepdim=True) + R**2).sqrt()


def projected(u: Tensor) -> Tensor:
    return u * R / length(u).clamp_min(R)


def remainder(f: Callable[[Tensor], Tensor], u: Tensor, eta: Tensor) -> Tensor:
    """Return f(u + eta) - f(u) - J eta."""
    y, linear = torch.func.jvp(f, (u,), (eta,))[:2]
    moved: Tensor = f(u + eta) - y - linear
    return moved


@pytest.mark.parametrize("size", [1e-2, 0.3, 1.0])
@pytest.mark.parametrize("kind", [BoundedForms, ProjectForms])
def test_every_step_of_the_form_holds(kind: type[NormForms], size: float) -> None:
    """Check the equation, the range of its factors, each term, and their sum."""
    generator = torch.Generator().manual_seed(0)
    u, eta, g = torch.randn(3, T, D, generator=generator).double()
    u, eta = u * 3, eta * size
    f = bounded if kind is BoundedForms else projected
    wide = 1 + torch.rand(T, 1, generator=generator).double()
    n = u / length(u)
    forms = kind(u, R)
    reach = TokenRange.of(torch.cat([wide * eta.abs(), wide * dot(n, eta).abs(), wide * length(eta)], -1))
    plane, factors, t = Plane.of(g, n), forms._factors(reach), forms._divisor
    valid = factors.near
    if isinstance(forms, ProjectForms):  # of the terms outside the form
        valid = valid & (length(u) > R) & (reach.line < forms._k)
    a, omega = dot(u, eta) / t.square(), forms._omega
    b2 = (eta.square().sum(-1, keepdim=True) / t.square() - a.square()).clamp_min(0)
    s = ((1 + a).square() + b2).sqrt()
    alpha, beta, w = 1 / (s * (s + 1 + a)), 1 / (s * (s + 1)), dot(g - (1 - omega) * dot(g, n) * n, eta) / t
    rest, fall = remainder(f, u, eta), 2 * a + a.square() + b2
    dip = -dot(g, rest) / R
    room = 1e-12 * length(g) + 1e-300

    def holds(less: Tensor, more: Tensor) -> None:
        assert ((less <= more + room + 1e-9 * more.abs()) | ~valid).all()

    exact = alpha * dot(g, u) / t * b2 + beta * w * fall
    holds((dip - exact).abs(), 1e-11 * length(g))
    holds(
        (rest.square().sum(-1, keepdim=True) - R**2 * b2 * (alpha.square() * b2 + beta.square() * fall.square())), 0 * a
    )
    for factor, (low, high) in ((alpha, factors.alpha), (beta, factors.beta)):
        holds(low, factor)
        holds(factor, high)
    middle, half = (factors.beta[1] + factors.beta[0]) / 2, (factors.beta[1] - factors.beta[0]) / 2
    toward = dot(g, u) / t
    first = torch.where(toward > 0, factors.alpha[1], factors.alpha[0]) * toward * b2
    holds(alpha * toward * b2, first)
    change2 = eta.square().sum(-1, keepdim=True) / t.square()
    lift = forms._lift(plane, reach, factors)
    second = 2 * middle * a * w + 2 * half * (a * w).abs() + lift * eta.square().sum(-1, keepdim=True)
    holds(beta * w * fall, second)
    curved = forms._curved(plane, reach)
    holds(R * (first + second), dot(eta, curved.times(eta, plane)) / 2)
    holds(rest.square().sum(-1, keepdim=True), forms._turned(reach) * eta.square().sum(-1, keepdim=True))
    holds(b2, change2)
    assert valid.float().mean() > 0.2
