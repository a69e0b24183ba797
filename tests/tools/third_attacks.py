"""Attack on the forms of third order of a leaf: ascent over two changes X and X + b within one ellipsoid."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.tools.ascent import ascend
from tests.tools.form_attacks import RANK, Attack, dot, energy
from zoo.bounds.contracts import QuadraticForm, ThirdForms


def second_order(f: Callable[[Tensor], Tensor], change: Tensor) -> Tensor:
    """Return D^2 f[X, X] at 0 by automatic differentiation along t X, X (S, B, ...).

    f has no layer_norm of torch, whose derivatives beyond the second are wrong.
    """
    t = torch.zeros(change.shape[:2], dtype=change.dtype, requires_grad=True)
    twice = _rate(_rate(lambda t: f(t.view(*t.shape, *(1,) * (change.ndim - 2)) * change)))
    return twice(t)


def _rate(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the derivative of f, each t (S, B) of which has an output of its own: the transpose of the transpose."""

    def rate(t: Tensor) -> Tensor:
        y = f(t)
        u = torch.zeros_like(y, requires_grad=True)
        (pulled,) = torch.autograd.grad((y * u).sum(), t, create_graph=True)
        (pushed,) = torch.autograd.grad(pulled.sum(), u, create_graph=True)
        return pushed

    return rate


def beaten(attack: Attack, steps: int = 20, starts: int = 3) -> bool:
    """Check if ascent finds X and b that lose more than the forms of third order claim."""
    g, size_B = attack.instance.g[:1], attack.instance.size_B()
    weight_B = attack.instance.g[0].flatten(1).norm(dim=1)
    along, rest = attack.third, attack.forms.third_rest(attack.reach, attack.weight)
    assert along is not None
    assert rest is not None

    def parts(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, h = (attack.change(one) for one in v.unbind(1))
        return x, h - x, h

    def excess(v: Tensor) -> Tensor:
        x, b, h = parts(v)
        lost = -dot(g, attack.rest(h) - attack.forms.spread(second_order(attack.inner_rest, x)) / 2)
        return (lost - claimed(along, x, b)).flatten()

    def longer(v: Tensor) -> Tensor:
        x, b, h = parts(v)
        t = attack.inner_rest(h) - second_order(attack.inner_rest, x) / 2
        return ((attack.weight * t).flatten(2).norm(dim=2) - root(rest.delta, x) - root(rest.kappa, b)).flatten()

    def both(objective: Callable[[Tensor], Tensor]) -> Tensor:
        start = torch.zeros(len(size_B), 2, RANK, dtype=torch.float64)
        return ascend(lambda v: objective(within(v)), start, 2 * torch.ones_like(size_B), steps, starts)

    scale_B = size_B * attack._unit_scale()
    return bool((both(excess) > 1e-10 * size_B * weight_B).any() or (both(longer) > 1e-10 * scale_B).any())


def within(v: Tensor) -> Tensor:
    """Bring the last axis of v into the unit ball."""
    return v / v.norm(dim=-1, keepdim=True).clamp_min(1)


def claimed(forms: ThirdForms, x: Tensor, b: Tensor) -> Tensor:
    """Return the right side of `Forms.third`."""
    by_x, by_b = energy(forms.kappa, x).clamp_min(1e-300), energy(forms.kappa, b).clamp_min(1e-300)
    return energy(forms.delta, x) / 2 + (by_x * by_b).sqrt() + by_b / 2 + forms.delta.constant


def root(form: QuadraticForm, h: Tensor) -> Tensor:
    return energy(form, h).clamp_min(1e-300).sqrt()
