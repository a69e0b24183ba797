"""The core of Lipschitz normalisation (lipschitz_norm.py) as that of dot products, with c held, and what c adds to it.

With c' = c / t, scores are t S', S' = (q^ + eta^q) (k + eta^k) / c. So the module is the core of dot products, with its
forms (theory/forms.py), of which the change of q is eta^q / c, and the effect of t, for which J has -Dc / c Cov(S, v).
Row by row, where P_t / P <= e^2D for all t on the way,

    |<o, out(t) - out(1) + Dc / c Cov(S, v)>| <= |t - 1| (e^2D sd(S') sd(o v') - sd(S) sd(o v))
                                                 + (|t - 1| + |Dc / c|) |<o, Cov(S, v)>|

This is a number, not a form: scores are small after this normalisation.

Per head c is the largest of u v, u w and v w, with u = |Q|, v and w the largest rows of K and V. A norm z has a line
D_z = <n_z, eta>, its derivative, with n_z along Q or along its row, and

    max(z - |D_z|, L) <= z' <= max( ((z + |D_z|)^2 + |eta|^2)^(1/2), |another row| + |eta| )

with L the least of the largest row that a change of this length can leave. Proof: docs/proofs.md#quotient-forms.

Letters: B images, C gradients, H heads, N tokens, O width of a head; 3 stands for q, k, v and for u, v, w.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zoo.arithmetic import U, at_least_near, gamma, nan_to_inf
from zoo.attention.softmax.parts import CoreLeafForms
from zoo.attention.softmax.projected_forms import Projection
from zoo.attention.softmax.quotient import largest_product, least_maximum
from zoo.attention.theory.core import Core
from zoo.bounds.contracts import QuadraticForm, SignedForm
from zoo.bounds.elementwise import largest_share

SHARE = 0.1  # of the core's form that is spent so that the effect of t may be added to it
PAD = 1e-12  # relative: above the rounding of norms and of what follows from them


@dataclass(frozen=True)
class Norms:
    """The three norms of every head at the clean q^, k^, v^ (B, 3, H, N, O): sizes and dc / d(u, v, w), (B, 3, H) each.

    `own` (B, 3, H, N) is 1 for the rows that they belong to.
    """

    projected: Tensor
    own: Tensor
    size: Tensor
    slopes: Tensor
    c_BH: Tensor

    @cached_property
    def n(self) -> Tensor:
        """The directions n_z (B, 3, H, N, O)."""
        return self.own.unsqueeze(-1) * self.projected / self.size.clamp_min(1e-300)[..., None, None]

    @cached_property
    def rows(self) -> Tensor:
        """The lengths of all rows (B, 3, H, N)."""
        return torch.linalg.vector_norm(self.projected, dim=-1)


@dataclass(frozen=True)
class Moved:
    """Upper bounds for each head (B, H): |t - 1|, infinite where c' may be `smallest`, |Dc / c|, and |K'| row by row.

    `whole` (B, 3, H) bounds |eta| of q, k and v.
    """

    factor: Tensor
    linear: Tensor
    longest: Tensor
    whole: Tensor

    @staticmethod
    def of(norms: Norms, smallest: float, line: Tensor, whole: Tensor) -> "Moved":
        """Return them for the reaches of D_z and of |eta|, (B, 3, H) each."""
        line, whole = (at_least_near(one) * (1 + PAD) for one in (torch.minimum(line, whole), whole))
        size = norms.size
        others = (norms.rows + whole.unsqueeze(-1)).masked_fill(norms.own > 0, 0.0).amax(-1)
        high = torch.maximum(torch.minimum(size + whole, torch.hypot(size + line, whole)), others) * (1 + PAD)
        low = torch.maximum((size - line).clamp_min(0), least_maximum(norms.rows, whole)) * (1 - PAD)
        c, (least, most) = norms.c_BH, (largest_product(bound.unbind(1)) for bound in (low, high))
        factor = torch.maximum(c / least - 1, 1 - c / most)
        factor = torch.where(least > smallest * (1 + PAD), factor * (1 + PAD) + PAD, torch.inf)
        return Moved(factor, (norms.slopes * line).sum(1) / c * (1 + PAD), high[:, 1], whole)


@dataclass(frozen=True)
class TemperedForms:
    """Forms (see `Forms`) of the core as a function of (q^, k^, v^), (B, 3, H, N, O), where c moves too. B = I.

    The functionals are those of the core for (eta^q / c, eta^k, eta^v), then the lines, and the lengths of eta^q, eta^k
    and eta^v of every head.
    """

    inner: CoreLeafForms
    norms: Norms
    smallest: float

    @property
    def shared(self) -> bool:
        return False

    @property
    def sizes(self) -> Tensor:
        return torch.cat([self.inner.sizes * self._most, torch.ones_like(self.norms.size).flatten(1).repeat(1, 2)], 1)

    def sizes_behind(self, first: Projection) -> Tensor:
        """Return the sizes of the functionals as those of the tokens."""
        q, k, _ = first.heads_3H
        scores = self._core.p[0].numel()
        of_scores = torch.hypot(q * self.scale_BH, k.expand_as(self.scale_BH)) * (1 + PAD)
        scaled = self.inner.sizes[:, :scores] * of_scores[..., None, None].expand(self._core.p.shape).flatten(1)
        axes = first.rows_3HO.unsqueeze(2) * self._factors
        own = first.heads_3H.flatten().repeat(2)
        return torch.cat([scaled, axes.expand(self.norms.n.shape).flatten(1), own.expand(len(scaled), -1)], 1)

    @property
    def slack(self) -> Tensor:
        own = self.norms.size.new_full((2 * self.norms.size[0].numel(),), gamma(4 * self._core.q[0, 0].numel() + 64))
        inner = self._most * (self.inner.slack * (1 + U) + 2 * U * self.inner.sizes)
        return torch.cat([inner, own.expand(len(inner), -1)], 1)

    @property
    def spread_rounding(self) -> float:
        return 0.0

    @property
    def pooled(self) -> int:
        return self.inner.pooled

    def squares(self, probes: Tensor) -> Tensor:
        lines = (probes * self.norms.n).sum((-2, -1)).square().sum(0).flatten(1)
        return torch.cat([self.inner.squares(self._factors * probes), lines, torch.full_like(lines, torch.inf)], 1)

    def of_gradient(self, g: Tensor, reach: Tensor) -> QuadraticForm:
        return self._scaled(self.inner.of_gradient(g, self._inner(reach)), self._along(g, reach))

    def of_rest(self, reach: Tensor, weight: Tensor) -> QuadraticForm:
        form, most = self.inner.of_rest(self._inner(reach), weight), weight.flatten(1).amax(1)
        more = self._norm(reach).square().sum((-2, -1)) * most.square()
        return self._scaled(form, (1 + 1 / SHARE) * more[None], 1 + SHARE)

    def signed(self, g: Tensor, reach: Tensor) -> SignedForm:
        constant = self._along(g, reach)
        return SignedForm(*(self._scaled(form, constant) for form in self.inner.signed(g, self._inner(reach))))

    def size(self, reach: Tensor) -> Tensor:
        return self.inner.size(self._inner(reach))

    def shrink(self, small: Tensor, large: Tensor) -> Tensor:
        less, more = (self._norm(reach) for reach in (small, large))
        by_core = self.inner.shrink(self._inner(small), self._inner(large))
        return torch.maximum(by_core, largest_share(less, more).square())

    def spread(self, r: Tensor) -> Tensor:
        return r

    def collect(self, g: Tensor) -> Tensor:
        return g

    @property
    def _core(self) -> Core:
        return self.inner.core.core

    @property
    def scale_BH(self) -> Tensor:
        """1 / c."""
        return 1 / self.norms.c_BH

    @property
    def _factors(self) -> Tensor:
        """1 / c for queries, 1 for keys and values: (B, 3, H, 1, 1)."""
        one = torch.ones_like(self.scale_BH)
        return torch.stack([self.scale_BH, one, one], 1)[..., None, None]

    @property
    def _most(self) -> Tensor:
        """The largest of them (B, 1)."""
        return self.scale_BH.amax(1, keepdim=True).clamp_min(1)

    @cached_property
    def _covariance(self) -> Tensor:
        """Cov(S, v) of every row (B, H, N, O)."""
        return (self._core.p * self._centred) @ self._core.values

    @cached_property
    def _centred(self) -> Tensor:
        """S~, the scores less their mean under each row of P (B, H, N, N)."""
        return self._core.turned(self._core.q, torch.zeros_like(self._core.k))

    def moved(self, reach: Tensor) -> Moved:
        """Bound what follows from lines and lengths; where a length has no bound of its own, coordinates bound it."""
        line, whole = reach[:, self.inner.sizes.shape[1] :].unflatten(1, (2, *self.norms.size.shape[1:])).unbind(1)
        axes = self._inner(reach)[:, self._core.p[0].numel() :].unflatten(1, self.norms.n.shape[1:])
        by_axes = torch.linalg.vector_norm(axes / self._factors, dim=(-2, -1)) * (1 + PAD)
        return Moved.of(self.norms, self.smallest, line, torch.minimum(whole, by_axes))

    def _inner(self, reach: Tensor) -> Tensor:
        return reach[:, : self.inner.sizes.shape[1]]

    def _along(self, g: Tensor, reach: Tensor) -> Tensor:
        """Bound what t adds to -<g, R> (C, B)."""
        core = self._core
        spread = (core.p * core.directional(g).square()).sum(-1).sqrt()
        turned = (g * self._covariance).sum(-1).abs()
        return self._effect(reach, spread, turned, g.norm(dim=-1)).sum((-2, -1))

    def _norm(self, reach: Tensor) -> Tensor:
        """Bound the norm of what t adds to R in every row (B, H, N)."""
        core = self._core
        spread = (core.p * core.softmax.centred(core.values).square().sum(-1)).sum(-1).sqrt()
        return self._effect(reach, spread, self._covariance.norm(dim=-1), 1.0)

    def _effect(self, reach: Tensor, spread: Tensor, turned: Tensor, length: Tensor | float) -> Tensor:
        """Bound the effect of t on every row, for these sd(o~), |<o, Cov(S, v)>| and |o| (..., B, H, N)."""
        core, moved = self._core, self.moved(reach)
        by_q, by_k, by_v = (one.unsqueeze(-1) for one in moved.whole.unbind(1))
        factor, linear, longest = (one.unsqueeze(-1) for one in (moved.factor, moved.linear, moved.longest))
        q, root = core.q.norm(dim=-1), core.p.amax(-1).sqrt()
        by_q = core.s * longest * by_q * self.scale_BH.unsqueeze(-1)
        own, most = (core.p * self._centred.square()).sum(-1).sqrt(), self._centred.abs().amax(-1)
        scores, farthest = own + core.s * q * root * by_k + by_q, core.s * q * by_k + by_q
        inputs = spread + length * core.gain_H.abs()[:, None] * root * by_v
        steeper = (2 * (factor * most + (1 + factor) * farthest)).exp()
        more = (steeper * scores * inputs - own * spread).clamp_min(0)
        return nan_to_inf(factor * more + (factor + linear) * turned) * (1 + 1e-9)

    def _scaled(self, form: QuadraticForm, constant: Tensor, factor: float = 1.0) -> QuadraticForm:
        """Return `factor` times the form for the unscaled change, with this constant added."""
        most2 = factor * self._most[:, 0].square()
        return QuadraticForm(
            lambda v: factor * self._factors * form.apply(self._factors * v),
            most2 * form.largest,
            factor * form.constant + constant,
            2 * most2 * (form.rounding + 8 * U * form.largest),
        )
