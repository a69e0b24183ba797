"""Attack on the quadratic forms of a leaf, by ascent within an ellipsoid of changes."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.tools.ascent import ascend
from tests.tools.curvature_cases import Case, instances
from tests.tools.expansions import Instance
from zoo.bounds.contracts import Expansion, Forms, QuadraticForm
from zoo.bounds.elementwise import UnitForms
from zoo.layers.norm_forms import NormForms, ProjectForms
from zoo.layers.norms import LayerProject

RANK = 5  # dimensions of an ellipsoid of changes


@dataclass(frozen=True)
class Attack:
    """Changes H = L v, |v| <= 1, of each of B inputs: L (K, B, ...), and the reach of all functionals among them."""

    instance: Instance
    expansion: Expansion
    forms: Forms
    axes: Tensor
    reach: Tensor

    @classmethod
    def of(cls, instance: Instance, seed: int) -> "Attack":
        """Limit |H| <= r; for odd inputs L is mostly one direction, for every fourth the token's own."""
        torch.manual_seed(seed)
        expansion = instance.expansion()
        forms = expansion.forms
        assert forms is not None
        axes = torch.randn(RANK, *instance.x.shape, dtype=torch.float64)
        axes[1:, 1::2] *= 0.1
        axes[0, 3::4] = instance.x[3::4]
        length_B = torch.linalg.matrix_norm(axes.flatten(2).permute(1, 0, 2), 2)
        axes = axes * (instance.r_B / length_B).view(1, -1, *(1,) * (instance.x.ndim - 1))
        squares = forms.squares(axes)
        sizes = forms.sizes * instance.r_B.view(-1, *(1,) * (squares.ndim - 1))
        return cls(instance, expansion, forms, axes, torch.minimum(squares.sqrt(), sizes) * (1 + 1e-12))

    def change(self, v: Tensor) -> Tensor:
        """Map v (S B, K) to H (S, B, ...)."""
        return torch.einsum("sbk,kb...->sb...", v.unflatten(0, (-1, len(self.instance.x))), self.axes)

    def rest(self, change: Tensor) -> Tensor:
        """Return R(H), (S, B, *y)."""
        x, module = self.instance.x, self.instance.module
        return torch.stack([module(x + h) for h in change]) - self.expansion.y - self.expansion.push(change)

    def inner_rest(self, change: Tensor) -> Tensor:
        """Return r (S, B, ...), of which R = B r."""
        forms = self.forms
        if isinstance(forms, NormForms):
            radius = forms.radius

            def scaled(u: Tensor) -> Tensor:
                length = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
                kinked = isinstance(forms, ProjectForms)
                return u * radius / (length.clamp_min(radius) if kinked else (length.square() + radius**2).sqrt())

            eta = forms.inner(change)
            n, t = forms._n, forms._divisor
            turned = eta - n * (n * eta).sum(-1, keepdim=True) * (1 - forms._omega)
            inside = forms._inside if isinstance(forms, ProjectForms) else torch.zeros_like(t).bool()
            return scaled(forms.u + eta) - scaled(forms.u) - torch.where(inside, eta, turned * radius / t)
        assert isinstance(forms, UnitForms)
        act: Any = getattr(self.instance.module, "act", self.instance.module)
        z, d = forms.z_BNH, forms.units(change)
        shape = self.instance.x.shape if act is self.instance.module else z.shape

        def sigma(z: Tensor) -> Tensor:
            return act(z.reshape(-1, *shape[1:])).reshape(z.shape)

        return sigma(z + d) - sigma(z) - forms.activation.slope(z) * d

    @property
    def weight(self) -> Tensor:
        """Return weights of the entries of r, (B, ...)."""
        room = self.forms.collect(self.instance.g[:1])[0]
        return 0.5 + torch.rand(room.shape, generator=torch.Generator().manual_seed(0), dtype=room.dtype)

    def beaten(self) -> bool:
        """Check if ascent finds a change that loses more than a form claims."""
        size_B, g = self.instance.size_B(), self.instance.g[:1]
        gradient, signed = self.forms.of_gradient(g, self.reach), self.forms.signed(g, self.reach).form
        rest = self.forms.of_rest(self.reach, self.weight)
        weight_B = self.instance.g[0].flatten(1).norm(dim=1)

        def excess(form: QuadraticForm, v: Tensor) -> Tensor:
            h = self.change(v)
            return (-dot(g, self.rest(h)) - energy(form, h) / 2 - form.constant).flatten()

        def longer(v: Tensor) -> Tensor:
            h = self.change(v)
            return (
                (self.weight * self.inner_rest(h)).flatten(2).norm(dim=2) - energy(rest, h).clamp_min(1e-300).sqrt()
            ).flatten()

        start, one_B = torch.zeros(len(size_B), RANK, dtype=torch.float64), torch.ones_like(size_B)
        found = [ascend(partial(excess, form), start, one_B, steps=30, starts=4) for form in (gradient, signed)]
        found_rest_B = ascend(longer, start, one_B, steps=30, starts=4)
        scale_B = size_B * self._unit_scale()
        found_B = torch.stack(found).amax(0)
        return bool((found_B > 1e-10 * size_B * weight_B).any() or (found_rest_B > 1e-10 * scale_B).any())

    def _unit_scale(self) -> float:
        """Return sizes of hidden units, relative to the input."""
        return float(1 + (self.forms.form.norm if isinstance(self.forms, UnitForms) else 0))


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(2).sum(2)


def energy(form: QuadraticForm, h: Tensor) -> Tensor:
    return dot(h, form.apply(h))


def attacks(case: Case, seed: int, modules: int = 5) -> Iterator[Attack]:
    for instance in instances(case, seed, modules):
        yield Attack.of(instance, seed)


def dense(form: QuadraticForm, x: Tensor) -> Tensor:
    """Return the form as dense matrices (C, B, n, n)."""
    eye = torch.eye(x[0].numel(), dtype=torch.float64)
    columns = [form.apply(e.view(1, 1, *x.shape[1:]).expand(1, *x.shape)).flatten(2) for e in eye]
    return torch.stack(columns, -1)


def grazing(seed: int) -> Iterator[Attack]:
    """Return LayerProject with tokens near its sphere, on either side, and changes that cross it."""
    torch.manual_seed(seed)
    for radius in (0.5, 2.0):
        x = torch.randn(20, 1, 4, dtype=torch.float64)
        x = x / x.norm(dim=-1, keepdim=True) * radius * (0.7 + 0.6 * torch.rand(20, 1, 1))
        g = torch.randn(1, 20, 1, 4, dtype=torch.float64) + torch.sign(torch.randn(20, 1, 1)) * 3 * x / radius
        yield Attack.of(Instance(LayerProject(4, radius), x, g, radius * (0.05 + torch.rand(20).double())), seed)
