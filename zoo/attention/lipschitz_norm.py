"""Lipschitz normalisation of attention (Dasoulas, Scaman, Virmaux 2021), per head and image.

    F(X) = sum_l softmax(Q K^T / c) V W_O^l,
    c = max(u v, u w, v w),     u = ||Q||_F,  v = max_j ||k_j||,  w = max_j ||v_j||

This is the paper's formula; the authors' code also divides the score by sqrt(D / H).
Letters: B images, N tokens, D width, H heads, O = D / H.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.arithmetic import nan_to_inf
from zoo.attention.lipschitz import global_layer
from zoo.attention.softmax.module import QKVAttention
from zoo.attention.softmax.parts import CoreLeafForms
from zoo.attention.softmax.projected_forms import ProjectedForms, Projection, behind
from zoo.attention.softmax.qkv import QKVTransform, Split, qkv_split
from zoo.attention.softmax.quotient import Quotient
from zoo.attention.softmax.quotient_forms import Norms, TemperedForms
from zoo.attention.softmax.rows import RoundedRows, projected
from zoo.attention.softmax.rules import softmax_rules
from zoo.attention.theory.core import QKVRadii
from zoo.bounds.contracts import Expansion, Layer, Precision
from zoo.bounds.rule_table import NoRule, register

SMALLEST_C = 1e-12  # avoids 0 / 0 where two of u, v, w vanish


class LipschitzNormAttention(QKVAttention):
    """Normalised attention, x (B, N, D) -> (B, N, D). Options: those of `QKVAttention`."""

    def scores(self, q_BHNO: Tensor, k_BHNO: Tensor, v_BHNO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u_BH = torch.linalg.vector_norm(q_BHNO, dim=(-2, -1))
        v_BH, w_BH = (torch.linalg.vector_norm(rows, dim=-1).amax(-1) for rows in (k_BHNO, v_BHNO))
        c_BH = torch.maximum(u_BH * torch.maximum(v_BH, w_BH), v_BH * w_BH).clamp_min(SMALLEST_C)
        return q_BHNO / c_BH[..., None, None], k_BHNO, v_BHNO


VARIANTS = {"ln": LipschitzNormAttention}


def lipschitz_norm(module: LipschitzNormAttention) -> Layer:
    """Return the global rule with gains (1, 1 + kappa, 1 + sqrt(gamma)) on Q, K, V (see `global_layer`).

    For N = 1 the gains are (0, 0, 1). Here

        kappa^2 = e^2 / (e^2 + N - 1),      gamma = min(N, 1 + 2 / sqrt(N) + (e^2 - 3) / N).

    Proof. Let a_i = ||q_i|| / u. As c >= u v: |s_ij| <= a_i, and sum_i a_i^2 = 1.
    (1) p_ij = 1 / (1 + sum_{l != j} exp(s_il - s_ij)) <= 1 / (1 + (N - 1) exp(-2 a_i)) <= kappa^2.
    (2) p_ij <= exp(2 a_i) / N, and exp(2 a) <= 1 + 2 a + (e^2 - 3) a^2 on [0, 1] (the remainder over a^2 is a power
    series with positive coefficients, so it is largest at 1). As sum_i a_i <= sqrt(N), the columns of P sum to at most
    gamma; its rows to 1. So ||P||^2 <= gamma.
    (3) dF_i = sum_j p_ij dv_j + Cov_{p_i}(ds_i, v) and ||Cov_{p_i}(ds_i, v)|| <= w sd_{p_i}(ds_i). So, with the
    seminorm |ds|^2 = sum_i Var_{p_i}(ds_i): ||dF|| <= sqrt(gamma) ||dV|| + w |ds|. Where c changes its form, and at
    zero norms, F is still locally Lipschitz, so it is enough to consider each form. With Q~ = Q / u, so that ||dQ~|| <=
    ||dQ|| / u:

        c = u v (v >= w, u >= w):  ds_ij = dq~_i . k_j / v + (q~_i . dk_j - s_ij dv) / v
        c = u w (w >= v, u >= v):  ds_ij = dq~_i . k_j / w + q~_i . dk_j / w - s_ij dw / w
        c = v w (v >= u, w >= u):  ds_ij = dq_i . k_j / (v w) + q_i . dk_j / (v w) - s_ij (dv / v + dw / w)
        c = SMALLEST_C:            ds_ij = dq_i . k_j / c + q_i . dk_j / c

    The terms of dq: sum_j p_ij (dq_i . k_j)^2 <= ||dq_i||^2 v^2, so w |.| <= ||dQ|| (in the four cases w v / (u v), w v
    / (u w), w v / (v w), w v / c, each <= 1). Those of dk: sum_i p_ij (q_i . dk_j)^2 <= kappa^2 u^2 ||dk_j||^2 by (1),
    so w |.| <= kappa ||dK|| (w / v, 1, u / v, u w / c, each <= 1). Those of s: |s|^2 <= sum_ij p_ij s_ij^2 <= (u v /
    c)^2, so w |.| <= (w / v) |dv|; (v / w) |dw|; (u / v) |dv| + (u / w) |dw|; and |dv| <= ||dK||, |dw| <= ||dV||.
    Altogether at most ||dQ|| + (1 + kappa) ||dK|| + (1 + sqrt(gamma)) ||dV||.

    SpecFormer, eq. 41, does not contain W_V, and is wrong already for N = 1, where F(X) = X W_V W_O.

    Proof: docs/proofs.md#lipschitz-norm.
    """
    if module.scale != 1:
        raise NoRule(module, f"its scale is {module.scale}, but its rule covers scale 1 only")

    def gains(n: int) -> tuple[float, float, float]:
        if n == 1:
            return 0.0, 0.0, 1.0
        e2 = math.e**2
        kappa = math.sqrt(e2 / (e2 + n - 1))
        gamma = min(n, 1 + 2 / math.sqrt(n) + (e2 - 3) / n)
        return 1.0, 1 + kappa, 1 + math.sqrt(gamma)

    return global_layer(module, gains)


# local rules, and second order ----------------------------------------------------------------------------------------


class _Quotient:
    """q = q^ / c around a clean batch, c the greatest of three products of norms per head.

    J is the derivative of the greatest one, a b, with its largest rows kept; any linear map is allowed
    (docs/proofs.md#identity, docs/proofs.md#quotient). With Delta = c' - c, e = 1 / c' - 1 / c and Dc = b Da + a Db
    exactly

        R = q^' / c' - q^ / c - (dq^ / c - q^ Dc / c^2) = q^ (e + Dc / c^2) + dq^ e,
        e + Dc / c^2 = Delta^2 / (c^2 c') + (Dc - Delta) / c^2.

    A norm leaves its linearisation by at most rho^2 / (2 a), never downwards. So Delta - Dc lies between -rho_a rho_b
    and the sum of b rho_a^2 / (2 a) + a rho_b^2 / (2 b) + rho_a rho_b and the excess of another product, or other rows,
    over this one: at most (A + B + C)_+ with A = x y - a b <= 0, C = rho_x rho_y and B the rest, x rho_y + y rho_x + a
    rho_b + b rho_a. That grows linearly once it is positive; its superhomogeneous majorant, of degree 2, is C + B^2 /
    (4 |A|) for B > 2 |A|. Every head gets the whole of the three radii.
    """

    def __init__(self, projected_3BHNO: Tensor) -> None:
        self.q, k, v = projected_3BHNO.unbind(0)
        self.directions = self.q, k, v
        lengths_3BHN = projected_3BHNO[1:].norm(dim=-1)
        self.largest = lengths_3BHN.argmax(-1)
        two = F.pad(lengths_3BHN, (0, 1)).topk(2, -1).values  # with a single row, the second is 0
        u = self.q.flatten(-2).norm(dim=-1)
        self.norms_3BH = torch.stack([u, *two[..., 0]])
        second_3BH = torch.stack([torch.zeros_like(u), *two[..., 1]])
        i, j = torch.tensor([0, 0, 1], device=u.device), torch.tensor([1, 2, 2], device=u.device)
        products = self.norms_3BH[i] * self.norms_3BH[j]
        self.c_BH, active = products.max(0)
        self.c_BH = self.c_BH.clamp_min(SMALLEST_C)
        chosen = F.one_hot(active, 3).movedim(-1, 0).to(u)  # of the products
        self.partner_3BH = torch.stack(  # dc / d(u, v, w)
            [
                chosen[0] * self.norms_3BH[1] + chosen[1] * self.norms_3BH[2],
                chosen[0] * self.norms_3BH[0] + chosen[2] * self.norms_3BH[2],
                chosen[1] * self.norms_3BH[0] + chosen[2] * self.norms_3BH[1],
            ]
        )
        a, b = i[active], j[active]
        self.pair = torch.stack([a, b])
        self.a, self.b = (self.norms_3BH.gather(0, one[None])[0] for one in self.pair)
        # Candidates that may overtake a b: the other products, and a b with the second largest row for a or b; the
        # last entry says where there is no such candidate.
        others = [(i[m].expand_as(a), j[m].expand_as(b), active == m) for m in range(3)]
        self.rivals = [(self._norm(x), self._norm(y), x, y, same) for x, y, same in others]
        for replaced, kept, which in ((a, self.b, 0), (b, self.a, 1)):
            runner_up = second_3BH.gather(0, replaced[None])[0]
            self.rivals.append((runner_up, kept, replaced, self.pair[1 - which], replaced == 0))
        self.size_BH = u

    def _norm(self, which_BH: Tensor) -> Tensor:
        return self.norms_3BH.gather(0, which_BH[None])[0]

    def _radius(self, r: QKVRadii, which_BH: Tensor) -> Tensor:
        """Return the radius of the chosen norm: (..., B, H)."""
        return torch.where(which_BH == 0, r.q[..., None], torch.where(which_BH == 1, r.k[..., None], r.v[..., None]))

    def inverse(self, r: QKVRadii) -> tuple[Tensor, Tensor, Tensor]:
        """Return upper bounds of 1 / c', |e| and |Delta| (..., B, H).

        |e| is of degree 1, and |Delta|^2 over c' of degree 2.
        """
        ra, rb = (self._radius(r, one) for one in self.pair)
        low = (self.a - ra).clamp_min(0) * (self.b - rb).clamp_min(0)
        highest = low.new_zeros(())
        for x, y, first, second, _ in self.rivals:
            highest = torch.maximum(highest, (x + self._radius(r, first)) * (y + self._radius(r, second)) - self.c_BH)
        moved = torch.maximum(highest, self.c_BH - low)
        largest = torch.where(low > SMALLEST_C, 1 / low, math.inf)  # otherwise c' may be clamped to SMALLEST_C
        return largest, torch.maximum(largest - 1 / self.c_BH, highest / self.c_BH.square()), moved

    def nonlinear(self, r: QKVRadii, superhomogeneous: bool) -> Tensor:
        """Return an upper bound of |e + Dc / c^2| (..., B, H)."""
        largest, change, moved = self.inverse(r)
        ra, rb = (self._radius(r, one) for one in self.pair)
        own = self.b * ra.square() / (2 * self.a) + self.a * rb.square() / (2 * self.b) + ra * rb
        above = torch.zeros_like(own)
        for x, y, first, second, absent in self.rivals:
            rx, ry = self._radius(r, first), self._radius(r, second)
            lead, slope, curve = self.c_BH - x * y, x * ry + y * rx + self.a * rb + self.b * ra, rx * ry
            line = (slope + curve - lead).clamp_min(0)
            if superhomogeneous:
                line = torch.where(slope <= 2 * lead, line, curve + slope.square() / (4 * lead))
            above = torch.maximum(above, torch.where(absent, 0.0, line))
        second_order = (own + above) / self.c_BH.square() + moved.square() / self.c_BH.square() * largest
        if superhomogeneous:
            return nan_to_inf(second_order)
        return torch.minimum(nan_to_inf(second_order), change + (self.b * ra + self.a * rb) / self.c_BH.square())

    def first(self, r: QKVRadii) -> QKVRadii:
        share = self.size_BH / self.c_BH.square() * self.partner_3BH
        terms = [(f.amax(-1) * one) for f, one in zip(share, r, strict=True)]
        return QKVRadii(r.q * (1 / self.c_BH).amax(-1) + terms[0] + terms[1] + terms[2], r.k, r.v)

    def betas(self, r: QKVRadii) -> QKVRadii:
        zero, (_, change, _) = torch.zeros_like(r.q), self.inverse(r)
        heads = self.size_BH * self.nonlinear(r, superhomogeneous=False) + r.q[..., None] * change
        return QKVRadii(nan_to_inf(heads.square().sum(-1).sqrt()), zero, zero)

    def radii(self, r: QKVRadii) -> QKVRadii:
        largest, change, _ = self.inverse(r)
        direct = largest.amax(-1) * r.q + (self.size_BH * change).square().sum(-1).sqrt()
        return QKVRadii(torch.minimum(nan_to_inf(direct), nan_to_inf(self.first(r).q + self.betas(r).q)), r.k, r.v)

    def remainder(self, g_3CBHNO: Tensor) -> Callable[[QKVRadii], Tensor]:
        inner_CBH = (g_3CBHNO[0] * self.q).sum((-2, -1)).abs()
        length_CBH = g_3CBHNO[0].flatten(-2).norm(dim=-1)

        def bound(r: QKVRadii) -> Tensor:
            nonlinear, change = self.nonlinear(r, superhomogeneous=True), self.inverse(r)[1]
            return nan_to_inf((inner_CBH * nonlinear + length_CBH * r.q[..., None] * change).sum(-1))

        return bound

    def leaves(self, first: Projection, own: Expansion, core: Expansion) -> tuple[Expansion, ...]:
        """Return one leaf for projection, quotient and core."""
        assert isinstance(core.forms, CoreLeafForms)
        rows = F.one_hot(self.largest, self.q.shape[-2]).to(self.q)
        largest = torch.stack([torch.ones_like(rows[0]), *rows], 1)
        sizes, slopes = (one.movedim(0, 1) for one in (self.norms_3BH, self.partner_3BH))
        norms = Norms(torch.stack(self.directions, 1), largest, sizes, slopes, self.c_BH)
        forms = TemperedForms(core.forms, norms, SMALLEST_C)
        behind_both = ProjectedForms(forms, first.leaf, forms.sizes_behind(first))
        return (behind(first.leaf, behind(own, core), behind_both),)

    def pull(self, g_3CBHNO: Tensor) -> Tensor:
        """Return dq^ / c, and -q^ / c^2 times the partner of each norm along its direction."""
        weight_CBH = -(g_3CBHNO[0] * self.q).sum((-2, -1)) / self.c_BH.square()
        u, (v, w) = self.norms_3BH[0], self.norms_3BH[1:]
        on_q = (weight_CBH * self.partner_3BH[0] / u.clamp_min(1e-300))[..., None, None] * self.q
        parts = [g_3CBHNO[0] / self.c_BH[..., None, None] + on_q]
        for m, length in ((1, v), (2, w)):
            row = F.one_hot(self.largest[m - 1], self.q.shape[-2]).to(self.q).unsqueeze(-1)
            factor = (weight_CBH * self.partner_3BH[m] / length.clamp_min(1e-300))[..., None, None]
            parts.append(g_3CBHNO[m] + factor * row * self.directions[m])
        return torch.stack(parts)


def lipschitz_norm_split(module: LipschitzNormAttention) -> Split:
    """Return the steps: the quotient, then the core."""

    def transform(projected_3BHNO: Tensor) -> QKVTransform:
        of = _Quotient(projected_3BHNO)
        y_3BHNO = torch.stack(module.scores(*projected_3BHNO))
        return QKVTransform(y_3BHNO, of.first, of.radii, of.betas, of.remainder, of.pull, of.leaves)

    def rounded(precision: Precision) -> RoundedRows:
        project = projected(module, precision)
        return lambda x_BWND: Quotient.of(project(x_BWND), SMALLEST_C, precision)

    return qkv_split(module, transform, rounded)


register(LipschitzNormAttention, softmax_rules(lipschitz_norm, lipschitz_norm_split))
