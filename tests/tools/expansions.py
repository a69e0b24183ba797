"""Search for counter-examples to second-order rules: -<g, R(G)>, ||R(G)|| and ||J v|| on the ball ||G|| <= r.

Letters: B inputs, C gradients (classes).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.tools.ascent import ascend
from zoo.bounds.contracts import Expansion
from zoo.bounds.curvature import expansion_of


@dataclass(frozen=True)
class Instance:
    """A module, clean inputs x (B, ...), gradients g (C, B, *y) and radii r (B,)."""

    module: nn.Module
    x: Tensor
    g: Tensor
    r_B: Tensor

    def expansion(self) -> Expansion:
        with torch.no_grad():
            return expansion_of(self.module)(self.x)

    def size_B(self) -> Tensor:
        """Return the scale of rounding errors: the radius, and the output of which R is a difference."""
        with torch.no_grad():
            return self.r_B + self.module(self.x).flatten(1).norm(dim=1)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1)


def largest_dip(case: Instance, steps: int = 40, starts: int = 4) -> Tensor:
    """Return max of -<g, R(G)> found: (C, B)."""
    expansion, classes = case.expansion(), len(case.g)
    with torch.no_grad():
        pulled = expansion.pull(case.g).flatten(0, 1)
    g, ones = case.g.flatten(0, 1), (1,) * (case.x.ndim - 1)
    x, r_P = case.x.repeat(classes, *ones), case.r_B.repeat(classes)
    y = expansion.y.repeat(classes, *(1,) * (expansion.y.ndim - 1))

    def objective(z: Tensor) -> Tensor:
        many = len(z) // len(x)
        g_z, y_z, pulled_z, x_z = (t.repeat(many, *(1,) * (t.ndim - 1)) for t in (g, y, pulled, x))
        return _dot(pulled_z, z - x_z) - _dot(g_z, case.module(z) - y_z)

    return ascend(objective, x, r_P, steps, starts).view(classes, -1)


def largest_remainder(case: Instance, steps: int = 40, starts: int = 4) -> Tensor:
    """Return max of ||R(G)|| found: (B,).

    J v comes from automatic differentiation of the pulled gradient, which is J^T.
    """
    expansion = case.expansion()

    def objective(z: Tensor) -> Tensor:
        many = len(z) // len(case.x)
        x = case.x.repeat(many, *(1,) * (case.x.ndim - 1))
        y = expansion.y.repeat(many, *(1,) * (expansion.y.ndim - 1))
        return (case.module(z) - y - push(case, expansion, z - x)).flatten(1).norm(dim=1)

    return ascend(objective, case.x, case.r_B, steps, starts)


def push(case: Instance, expansion: Expansion, v: Tensor) -> Tensor:
    """Return J v (many B, ...) for v (many B, ...), the transpose of `pull`."""
    classes = len(v) // len(case.x)
    probe = torch.zeros(classes, *expansion.y.shape, dtype=v.dtype, requires_grad=True)
    v = v.unflatten(0, (classes, -1))
    (jv,) = torch.autograd.grad((expansion.pull(probe) * v).sum(), probe, create_graph=True)
    return jv.flatten(0, 1)


def largest_gain(case: Instance, steps: int = 40) -> Tensor:
    """Return a lower bound of ||J|| by power iteration on J^T J: (B,)."""
    expansion = case.expansion()
    v = torch.randn_like(case.x)
    for _ in range(steps):
        v = v / v.flatten(1).norm(dim=1).clamp_min(1e-300).view(-1, *(1,) * (v.ndim - 1))
        jv = push(case, expansion, v).detach()
        with torch.no_grad():
            v = expansion.pull(jv[None])[0]
    return jv.flatten(1).norm(dim=1)


def ratios(bound: Tensor, found: Tensor, size: Tensor) -> Tensor:
    """Return bound / best found where the search found more than rounding; a counter-example is an error."""
    assert not torch.isnan(bound).any()
    beaten = found > bound * (1 + 1e-9) + 1e-12 * size
    assert not beaten.any(), f"bound beaten by a factor of {float((found / bound)[beaten].max())}"
    return (bound / found)[found > 1e-8 * size]


def tightness(cases: Iterable[Instance], steps: int = 40, starts: int = 4) -> dict[str, Tensor]:
    """Return bound / best found of the remainder, of beta and of the norm of J, over all instances."""
    found: dict[str, list[Tensor]] = {"remainder": [], "beta": [], "gain": []}
    for case in cases:
        expansion, size_B = case.expansion(), case.size_B()
        torch.testing.assert_close(expansion.y, case.module(case.x), rtol=0, atol=0)
        dip_CB, g_CB = largest_dip(case, steps, starts), case.g.flatten(2).norm(dim=2)
        found["remainder"].append(ratios(expansion.remainder(case.g)(case.r_B[None]), dip_CB, g_CB * size_B))
        found["beta"].append(ratios(expansion.beta(case.r_B), largest_remainder(case, steps, starts), size_B))
        found["gain"].append(ratios(expansion.gain_B, largest_gain(case), torch.ones_like(size_B)))
    return {name: torch.cat(values) for name, values in found.items()}


def report(what: str, found: dict[str, Tensor]) -> None:
    """Print one line for each ratio, shown by `pytest -s`."""
    for name, ratio in found.items():
        print(f"{what} {name}: {len(ratio)} instances, least {ratio.min():.3f}, median {ratio.median():.3f}")
