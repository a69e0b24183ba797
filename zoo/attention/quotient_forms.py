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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.arithmetic import U, at_least_near, gamma, nan_to_inf
from zoo.attention.parts import CoreLeafForms
from zoo.attention.projected_forms import Projection
from zoo.attention.quotient import PAIRS, least_maximum
from zoo.attention.theory.core import Core
from zoo.bounds.contracts import QuadraticForm, SignedForm
from zoo.bounds.elementwise import largest_share

SHARE = 0.1  # of the core's form that is spent so that the effect of t may be added to it
PAD = 1e-12  # relative: above the rounding of norms and of what follows from them


@dataclass(frozen=True)
class Norms:
    """The three norms of every head: their sizes (B, 3, H), and n_z (B, 3, H, N, O).

    `own` is 1 for the rows that they belong to, and `rows` are the lengths of all, (B, 3, H, N) each. `active` (B, H)
    is the number of the pair with the largest product.
    """

    size: Tensor
    n: Tensor
    own: Tensor
    rows: Tensor
    active: Tensor

    @staticmethod
    def of(projected_3BHNO: Tensor, largest_2BH: Tensor, active: Tensor) -> "Norms":
        """Return them, given the numbers of the largest rows of K and V."""
        projected_B3HNO = projected_3BHNO.transpose(0, 1)
        rows = F.one_hot(largest_2BH, projected_3BHNO.shape[-2]).to(projected_3BHNO)
        own = torch.stack([torch.ones_like(rows[0]), *rows], 1)
        largest = own.unsqueeze(-1) * projected_B3HNO
        size = torch.linalg.vector_norm(largest, dim=(-2, -1))
        n = largest / size.clamp_min(1e-300)[..., None, None]
        return Norms(size, n, own, torch.linalg.vector_norm(projected_B3HNO, dim=-1), active)

    @property
    def slopes(self) -> Tensor:
        """The derivatives of c by u, v and w (B, 3, H)."""
        return self.of_active([_partners(self.size, pair) for pair in PAIRS])

    def of_active(self, of_pairs: Sequence[Tensor]) -> Tensor:
        """Return what belongs to the pair with the largest product, of (B, ..., H) for each pair."""
        stacked = torch.stack(list(of_pairs))
        active = self.active.view(len(self.active), *(1,) * (stacked.ndim - 3), -1)
        return stacked.gather(0, active.expand_as(stacked[0])[None])[0]


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
        c = norms.of_active(_products(size))
        least, most = (torch.stack(_products(bound)).amax(0) for bound in (low, high))
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
    scale_BH: Tensor  # 1 / c
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
        core = self._core
        return (core.p * core.turned(core.q, torch.zeros_like(core.k))) @ core.values

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
        own, most = self._scores
        scores, farthest = own + core.s * q * root * by_k + by_q, core.s * q * by_k + by_q
        inputs = spread + length * core.gain_H.abs()[:, None] * root * by_v
        steeper = (2 * (factor * most + (1 + factor) * farthest)).exp()
        more = (steeper * scores * inputs - own * spread).clamp_min(0)
        return nan_to_inf(factor * more + (factor + linear) * turned) * (1 + 1e-9)

    @cached_property
    def _scores(self) -> tuple[Tensor, Tensor]:
        """sd(S) and max |S~| of every row (B, H, N)."""
        core = self._core
        centred = core.turned(core.q, torch.zeros_like(core.k))
        return (core.p * centred.square()).sum(-1).sqrt(), centred.abs().amax(-1)

    def _scaled(self, form: QuadraticForm, constant: Tensor, factor: float = 1.0) -> QuadraticForm:
        """Return `factor` times the form for the unscaled change, with this constant added."""
        most2 = factor * self._most[:, 0].square()
        return QuadraticForm(
            lambda v: factor * self._factors * form.apply(self._factors * v),
            most2 * form.largest,
            factor * form.constant + constant,
            2 * most2 * (form.rounding + 8 * U * form.largest),
        )


def _products(x_B3H: Tensor) -> list[Tensor]:
    return [x_B3H[:, i] * x_B3H[:, j] for i, j in PAIRS]


def _partners(x_B3H: Tensor, pair: tuple[int, int]) -> Tensor:
    """Return what multiplies each factor of a product, 0 for the third."""
    found, (i, j) = torch.zeros_like(x_B3H), pair
    found[:, i], found[:, j] = x_B3H[:, j], x_B3H[:, i]
    return found
