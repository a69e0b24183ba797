"""Cores of attention with changes eta = M u, |u| <= r, of q, k and v, and ascent on the forms of their remainders.

Letters: B instances, C gradients, H heads, N tokens, W width of a head, X numbers of u.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.tools.ascent import ascend
from zoo.attention.softmax.parts import CoreLeafForms, core_leaf
from zoo.attention.theory.core import Score
from zoo.attention.theory.separate import SeparateCore
from zoo.attention.theory.squares import QKV, applied
from zoo.attention.theory.third_forms import second_order, third
from zoo.bounds.contracts import Expansion, QuadraticForm

B, H, N, W, X = 10, 2, 4, 3, 9
SCORES = {
    "dot product": Score(0.8),
    "negative scale": Score(-0.8),
    "distances": Score(0.8, kappa=1.0),
    "tied distances": Score(0.8, kappa=1.0, tied=True),
}
RADII = (1e-3, 0.03, 0.3, 1.0, 5.0)


@dataclass(frozen=True)
class Case:
    """One core, its leaf, and the map that moves q, k and v."""

    core: SeparateCore
    leaf: Expansion
    moved: Callable[[Tensor], Tensor]
    m_XB3HNW: Tensor
    g: Tensor

    @property
    def forms(self) -> CoreLeafForms:
        assert isinstance(self.leaf.forms, CoreLeafForms)
        return self.leaf.forms

    def eta(self, u_BX: Tensor) -> Tensor:
        """(many B, 3, H, N, W)."""
        many = len(u_BX) // B
        return torch.einsum("mbx,xb...->mb...", u_BX.view(many, B, X), self.m_XB3HNW).flatten(0, 1)

    def reach(self, r: float) -> Tensor:
        """Return the exact reaches."""
        return self.forms.squares(self.m_XB3HNW).sqrt() * r

    def third(self, r: float) -> QuadraticForm:
        """Return the form of third order; the lengths of rows are exact."""
        rows = self.forms.rows(self.m_XB3HNW).movedim(0, -1)
        return self.forms.of_third(self.reach(r), r * torch.linalg.matrix_norm(rows, 2), ONE)

    def rest(self, eta: Tensor) -> Tensor:
        """Return R of changes (many B, ...)."""
        linear = self.leaf.push(eta.view(-1, B, 3, H, N, W)).flatten(0, 1)
        return self.moved(eta) - linear


def case_of(score: Score, seed: int = 0, tokens: Tensor | None = None) -> Case:
    """Return diffuse to sharp attention, with a bias and a gain as in windows and gated positions, and unequal eta."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    size = 10 ** torch.linspace(-1, 0.5, B, dtype=torch.float64).view(-1, 1, 1, 1)
    q, k, v = (randn(B, H, N, W) * size for _ in range(3))
    if score.tied:
        q = k
    bias, gain, constant = randn(1, H, N, N), torch.tensor([0.6, 1.0], dtype=torch.float64), randn(H, N, N)

    def mixed(p: Tensor) -> Tensor:
        return gain[:, None, None] * p + constant

    def p_of(q: Tensor, k: Tensor) -> Tensor:
        s = score.s * (q @ k.mT - score.kappa / 2 * k.square().sum(-1).unsqueeze(-2))
        return (s + bias).softmax(-1)

    p = p_of(q, k)
    core = SeparateCore(score, q, k, v, p, mixed(p), gain)
    m = randn(X, B, 3, H, N, W) * randn(1, B, 3, H, N, 1).exp() * X**-0.5
    if score.tied:
        m[:, :, 0] = m[:, :, 1]
    y = mixed(p) @ v

    def moved(eta: Tensor) -> Tensor:
        many = len(eta) // B
        q_, k_, v_ = (t.repeat(many, 1, 1, 1) + e for t, e in zip((q, k, v), eta.unbind(1), strict=True))
        return mixed(p_of(q_, k_)) @ v_ - y.repeat(many, 1, 1, 1)

    return Case(core, core_leaf(core, v), moved, m, randn(1, B, H, N, W))


ONE = torch.ones(1, 1, 1, 1, dtype=torch.float64)  # weights of an image


def share_of_gradient(case: Case, r: float) -> Tensor:
    """Return max -<g, R> / (<H, C H> / 2) found: (B,)."""
    form = case.forms.of_gradient(case.g, case.reach(r))

    def share(u: Tensor) -> Tensor:
        eta = case.eta(u)
        dip = -(case.g.expand(len(u) // B, *case.g.shape[1:]).flatten(0, 1) * case.rest(eta)).flatten(1).sum(1)
        return dip / (0.5 * squared(form.apply, eta)).clamp_min(1e-300)

    return ascend(share, torch.zeros(B, X).double(), torch.full((B,), r).double(), 60, 6)


def share_of_third(case: Case, r: float) -> Tensor:
    """Return max (-<g, R> + <H, D^2 H> / 2) / (<H, T H> / 2) found, T what the third order adds: (B,)."""
    reach = case.forms.core.reach(case.reach(r))
    second, beyond = second_order(case.forms.core, case.g), third(case.forms.core, case.g, reach)

    def share(u: Tensor) -> Tensor:
        eta = case.eta(u)
        dip = -(case.g.expand(len(u) // B, *case.g.shape[1:]).flatten(0, 1) * case.rest(eta)).flatten(1).sum(1)
        return (dip + worth([second], eta)) / worth(beyond, eta).clamp_min(1e-300)

    return ascend(share, torch.zeros(B, X).double(), torch.full((B,), r).double(), 60, 6)


def worth(sums: Sequence[Any], eta: Tensor) -> Tensor:
    """Return F of changes (many B, ...)."""
    return squared(lambda v: torch.stack(applied(sums, QKV(*v.unbind(2))), 2), eta)


def excess_of_signed(case: Case, r: float) -> Tensor:
    """Return max (-<g, R> - <H, C H> / 2) / (<H, |C| H> / 2) found, C the form of either sign: (B,)."""
    form, absolute = case.forms.signed(case.g, case.reach(r))

    def share(u: Tensor) -> Tensor:
        eta = case.eta(u)
        dip = -(case.g.expand(len(u) // B, *case.g.shape[1:]).flatten(0, 1) * case.rest(eta)).flatten(1).sum(1)
        return (dip - 0.5 * squared(form.apply, eta)) / (0.5 * squared(absolute.apply, eta)).clamp_min(1e-300)

    return ascend(share, torch.zeros(B, X).double(), torch.full((B,), r).double(), 60, 6)


def share_of_rest(case: Case, r: float) -> Tensor:
    """Return max |R|^2 / <H, C H> found: (B,)."""
    form = case.forms.of_rest(case.reach(r), ONE)

    def share(u: Tensor) -> Tensor:
        eta = case.eta(u)
        return case.rest(eta).flatten(1).square().sum(1) / squared(form.apply, eta).clamp_min(1e-300)

    return ascend(share, torch.zeros(B, X).double(), torch.full((B,), r).double(), 60, 6)


def share_of_third_norm(case: Case, r: float, small: float = 1.0) -> Tensor:
    """Return max |R - D^2[H, H] / 2|^2 / (t <H, C H>) found within a share of the reach, t what it shrinks by: (B,)."""
    form, shrink_B = case.third(r), case.forms.shrink_third(torch.full((B,), small, dtype=torch.float64))

    def share(u: Tensor) -> Tensor:
        eta = case.eta(u)
        v = eta.view(-1, B, 3, H, N, W)
        left = case.rest(eta) - 0.5 * case.forms.bilinear(v, v).flatten(0, 1)
        whole = squared(form.apply, eta) * shrink_B.repeat(len(v))
        return left.flatten(1).square().sum(1) / whole.clamp_min(1e-300)

    return ascend(share, torch.zeros(B, X).double(), torch.full((B,), small * r).double(), 60, 6)


def squared(apply: Callable[[Tensor], Tensor], eta: Tensor) -> Tensor:
    """Return <H, C H> of changes (many B, ...), with the same C for all."""
    v = eta.view(-1, B, 3, H, N, W)
    return (v * torch.cat([apply(one[None]) for one in v])).flatten(2).sum(-1).flatten()
