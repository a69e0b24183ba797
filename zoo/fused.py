"""x -> W_2 sigma(W_1 x + b_1) as one rule of second order, and the largest eigenvalues it needs, proved and batched.

    -<g, R(G)> = -sum over tokens and units of w_h R_h,   w = W_2^T g,   d_h = <a_h, eta> with a_h the rows of W_1

with the bounds of `activations.py` in terms of sum_h c_h d_h^2 = eta^T W_1^T diag(c) W_1 eta. MATH-PROOFS section 2.3.

Letters: B images, C classes, P pairs, N tokens, D width, H hidden units, I items (pair, token), d the number D.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo.activations import Bend, Form, Top, units_beta, units_remainder
from zoo.curvature import Expand, Expansion, pullback
from zoo.spectral import U, sigma_upper

STEP = math.log(1.01)  # eigenvalues are rounded up to powers of 1.01
SPAN = 700  # and never taken below 1.01^-700 = 1/1000 of their cheap bound
FORM_BYTES = 2**28  # memory for the matrices of a few items


def fused(
    module: nn.Module,
    bend: Bend,
    units: Callable[[Tensor], Tensor],
    w_1_HD: Tensor,
    w_2_DH: Tensor,
    scales_H: Tensor | None = None,
) -> Expand:
    """W_2 sigma(units(x)) with units(x) = W_1 x + b_1; `module` is the whole map (for y and J).

    With any scaling S > 0 of the units, ||R|| <= ||W_2 S^{-1}|| |S R_sigma|, and J = W_2 D W_1 has
    ||J||^2 <= ||W_2 S^{-1}||^2 lambda_max(W_1^T (S D)^2 W_1).
    """
    s_H = torch.ones_like(w_1_HD[:, 0]) if scales_H is None else scales_H
    lengths_H = torch.linalg.vector_norm(w_1_HD, dim=1)
    form = Form(lengths_H, s_H, sigma_upper(s_H[:, None] * w_1_HD), eigenvalue_bound(w_1_HD))
    outer = sigma_upper(w_2_DH / s_H)

    def expand(x: Tensor) -> Expansion:
        z_BNH = units(x).flatten(1, -2)
        beta = units_beta(bend, form, z_BNH)
        return Expansion(
            module(x),
            outer * form.top((s_H * bend.slope(z_BNH)).square()).sqrt(),
            lambda r: outer * beta(r),
            lambda g: units_remainder(bend, form, z_BNH, g.flatten(2, -2) @ w_2_DH),
            pullback(module, x),
        )

    return expand


def eigenvalue_bound(w_HD: Tensor) -> Top:
    """c (P, N, H) -> (P,), never below max_n lambda_max(W^T diag(c_n) W), nor below 0; nondecreasing in c.

    Cheap for every token: min(||W||^2 max c^+, sum_h c_h^+ |a_h|^2). The token where this is largest is solved first;
    of the others only those are looked at whose cheap bound exceeds what was found (MATH-PROOFS section 2.3).

    Rounding: a matrix computed from (c, W) is off by gamma_(H+2) max|c| ||W||_F^2, and a Cholesky factorisation of
    theta I - S that runs to completion proves lambda_max(S) <= theta + gamma_(d+2) tr(theta I - S) (Rump; MATH-PROOFS
    section 3). 4 (H + d + d^2) u max|c| ||W||_F^2 is above both as theta <= ||W||_F^2 max|c|.
    """
    lengths2_H = w_HD.square().sum(1)
    norm2 = sigma_upper(w_HD).square() * (1 + 4 * U)
    hidden, width = w_HD.shape
    slack = 4 * (hidden + width + width**2) * U * lengths2_H.sum()
    few = max(1, FORM_BYTES // (8 * w_HD.numel()))

    def top(c_PNH: Tensor) -> Tensor:
        positive = c_PNH.clamp_min(0)
        cheap_PN = torch.minimum(norm2 * positive.amax(-1), positive @ lengths2_H * (1 + 4 * hidden * U))
        above_PN = (cheap_PN.log() / STEP).ceil()  # exponents of 1.01; -inf for 0
        found_P = above_PN.amax(1) - SPAN
        pairs = torch.arange(len(c_PNH), device=c_PNH.device)
        first = above_PN.argmax(1)
        for p in pairs.split(few):
            found_P = _raised(found_P, w_HD, c_PNH[p, first[p]], p, above_PN[p, first[p]])
        above_PN[pairs, first] = -torch.inf
        rest = (above_PN > found_P[:, None]).nonzero()
        for item in rest.split(few):
            p, n = item.unbind(1)
            found_P = _raised(found_P, w_HD, c_PNH[p, n], p, above_PN[p, n])
        proved_P = (found_P * STEP).exp() * (1 + 1e-12) + slack * c_PNH.abs().amax((1, 2))
        return torch.where(torch.isneginf(found_P), 0.0, proved_P)  # no positive c: not even rounding

    return top


def _raised(found_P: Tensor, w_HD: Tensor, c_IH: Tensor, p_I: Tensor, above_I: Tensor) -> Tensor:
    """The least whole e >= found with 1.01^e >= lambda_max(W^T diag(c_i) W) for each item i of the pair, by bisection:
    1.01^above is a bound, and each step asks for Cholesky factorisations of those items that still matter."""
    form_IDD = (w_HD.mT * c_IH.unsqueeze(1)) @ w_HD
    low_P, middle_P = found_P - 1, found_P
    while True:
        active = ((above_I > middle_P[p_I]) & (middle_P[p_I] > low_P[p_I])).nonzero().squeeze(1)
        if not len(active):
            return torch.maximum(found_P, found_P.scatter_reduce(0, p_I, above_I, "amax"))
        at = p_I[active]
        shifted = -form_IDD[active]
        shifted.diagonal(dim1=-2, dim2=-1).add_((middle_P[at] * STEP).exp().unsqueeze(1))
        fits = torch.linalg.cholesky_ex(shifted).info == 0
        above_I = above_I.index_put((active[fits],), middle_P[at[fits]])
        low_P = low_P.scatter_reduce(0, at[~fits], middle_P[at[~fits]], "amax")
        high_P = found_P.scatter_reduce(0, p_I, above_I, "amax")
        middle_P = ((low_P + high_P) / 2).floor()
