"""x -> W_2 sigma(W_1 x + b_1) as one second-order rule, and the largest eigenvalues it needs, proved in batches.

    -<g, R(G)> = -sum over tokens and units of w_h R_h,   w = W_2^T g,   d_h = <a_h, eta> with a_h the rows of W_1

with the bounds of activations.py in terms of sum_h c_h d_h^2 = eta^T W_1^T diag(c) W_1 eta. docs/proofs.md#fused-mlp.

Letters: B images, C classes, P pairs, N tokens, D width, H hidden units, I items (pair, token), d the number D.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo.arithmetic import OUT, U, gamma
from zoo.bounds.activations import lipschitz
from zoo.bounds.contracts import Activation, Expand, Expansion, LambdaMax
from zoo.bounds.elementwise import Form, UnitForms, units_beta, units_remainder
from zoo.bounds.lanczos import ritz
from zoo.bounds.products import SLOPE, matrix_rounding
from zoo.spectral import absolute_norm, sigma_upper, start_vectors

STEP = math.log(1.01)  # eigenvalues are rounded up to powers of 1.01
SPAN = 700  # and never taken below 1.01^-700 = 1/1000 of their cheap bound
KRYLOV = 12  # vectors of the estimate that starts the proof
DIRECT = 2**22  # entries times width of matrices whose eigenvalues take less time than that estimate
FORM_BYTES = 2**28  # memory for the matrices of a few items


def fused(
    module: nn.Module,
    activation: Activation,
    units: Callable[[Tensor], Tensor],
    w_1_HD: Tensor,
    w_2_DH: Tensor,
    scales_H: Tensor | None = None,
    skip: float = 0.0,
    gain: float | None = None,
    off: float = 0.0,
) -> Expand:
    """Expand skip x + W_2 sigma(units(x)) with units(x) = W_1 x + b_1.

    `module` is the whole map, constants included; `gain` is a bound of ||J|| where a better one is known than here.
    `off` is the relative error of the columns of w_2_DH, where they are computed.

    With any scaling S > 0 of the units, ||R|| <= ||W_2 S^{-1}|| |S R_sigma|, and J = W_2 D W_1 has
    ||J||^2 <= ||W_2 S^{-1}||^2 lambda_max(W_1^T (S D)^2 W_1).
    """
    s_H = torch.ones_like(w_1_HD[:, 0]) if scales_H is None else scales_H
    lengths_H = torch.linalg.vector_norm(w_1_HD, dim=1)
    form = Form(lengths_H, s_H, sigma_upper(s_H[:, None] * w_1_HD), eigenvalue_bound(w_1_HD))
    outer = sigma_upper(w_2_DH / s_H) * (1 + off) * OUT
    absolute_1, absolute_2 = absolute_norm(w_1_HD), absolute_norm(w_2_DH)
    rounding_2 = matrix_rounding(w_2_DH) + off * absolute_2
    share = gamma(w_1_HD.shape[1] + 2) + gamma(w_1_HD.shape[0] + 2) + SLOPE + 4 * U + off
    rounding = (lipschitz(activation) * share * absolute_1 * absolute_2 + 4 * U * abs(skip)) * OUT

    def expand(x: Tensor) -> Expansion:
        z = units(x)
        z_BNH, slope = z.flatten(1, -2), activation.slope(z)
        beta = units_beta(activation, form, z_BNH)
        if gain is None:
            gain_B = skip + outer * form.lambda_max((s_H * slope.flatten(1, -2)).square().amax(1, keepdim=True)).sqrt()
        else:
            gain_B = x.new_full((len(x),), gain)
        return Expansion(
            y=module(x),
            gain_B=gain_B,
            beta=lambda r: outer * beta(r),
            remainder=lambda g: units_remainder(activation, form, z_BNH, g.flatten(2, -2) @ w_2_DH),
            pull=lambda g: skip * g + (g @ w_2_DH * slope) @ w_1_HD,
            own_push=lambda v: skip * v + (v @ w_1_HD.mT * slope) @ w_2_DH.mT,
            rounding_B=rounding.expand(len(x)),
            forms=UnitForms(
                activation,
                form,
                z_BNH,
                lambda v: (v @ w_1_HD.mT).flatten(2, -2),
                lambda d: (d @ w_1_HD).view(-1, *x.shape),
                lambda r: (r @ w_2_DH.mT).view(-1, *x.shape),
                lambda g: g.flatten(2, -2) @ w_2_DH,
                sum(w_1_HD.shape),
                absolute_1,
                rounding_2,
            ),
        )

    return expand


def eigenvalue_bound(w_HD: Tensor) -> LambdaMax:
    """Return c (P, N, H) -> (P,), never below max_n lambda_max(W^T diag(c_n) W) or 0, and nondecreasing in c.

    A cheap bound for every token is min(||W||^2 max c^+, sum_h c_h^+ |a_h|^2). The token where this is largest is
    solved first; then only tokens whose cheap bound exceeds that result (docs/proofs.md#eigenvalue-bound).

    Rounding: a matrix computed from (c, W) is off by gamma_(H+2) max|c| ||W||_F^2. A Cholesky factorisation of
    theta I - S that completes proves lambda_max(S) <= theta + gamma_(d+2) tr(theta I - S) (Rump;
    docs/proofs.md#sigma-upper). 4 (H + d + d^2) u max|c| ||W||_F^2 is above both as theta <= ||W||_F^2 max|c|.
    """
    lengths2_H = w_HD.square().sum(1)
    norm2 = sigma_upper(w_HD).square() * (1 + 4 * U)
    hidden, width = w_HD.shape
    slack = 4 * (hidden + width + width**2) * U * lengths2_H.sum()
    few = max(1, FORM_BYTES // (8 * w_HD.numel()))

    def lambda_max(c_PNH: Tensor) -> Tensor:
        positive = c_PNH.clamp_min(0)
        cheap_PN = torch.minimum(norm2 * positive.amax(-1), positive @ lengths2_H * (1 + 4 * hidden * U))
        above_PN = (cheap_PN.log() / STEP).ceil()  # exponents of 1.01; -inf for 0
        found_P = above_PN.amax(1) - SPAN
        pairs = torch.arange(len(c_PNH), device=c_PNH.device)
        first = above_PN.argmax(1)
        for p in pairs.split(few):
            exact_P = exponents(w_HD, c_PNH[p, first[p]], found_P[p], above_PN[p, first[p]])
            found_P = found_P.scatter(0, p, exact_P)
        above_PN[pairs, first] = -torch.inf
        rest = (above_PN > found_P[:, None]).nonzero()
        for item in rest.split(few) if len(rest) else ():
            p, n = item.unbind(1)
            exact_I = exponents(w_HD, c_PNH[p, n], found_P[p], above_PN[p, n])
            found_P = found_P.scatter_reduce(0, p, exact_I, "amax")
        proved_P = (found_P * STEP).exp() * (1 + 1e-12) + slack * c_PNH.abs().amax((1, 2))
        return torch.where(torch.isneginf(found_P), 0.0, proved_P)  # no positive c: not even rounding

    return lambda_max


def exponents(w_HD: Tensor, c_IH: Tensor, floor_I: Tensor, above_I: Tensor) -> Tensor:
    """Return the least whole e_i >= floor_i with 1.01^e_i >= lambda_max(W^T diag(c_i) W).

    1.01^above_i is already known to be such a bound. Cholesky factorisations try one e at a time until one proves it:
    first the floor, which is enough for most tokens, then from a Lanczos estimate from below.
    """
    form_IDD, e_I = (w_HD.mT * c_IH.unsqueeze(1)) @ w_HD, floor_I.clone()

    def unproved(open_I: Tensor) -> Tensor:
        """Return those of the items whose e proves nothing and is still below what is known."""
        open_I = open_I[e_I[open_I] < above_I[open_I]]
        shifted = -form_IDD[open_I]
        shifted.diagonal(dim1=-2, dim2=-1).add_((e_I[open_I] * STEP).exp().unsqueeze(1))
        return open_I[torch.linalg.cholesky_ex(shifted).info != 0]

    open_I = unproved(torch.arange(len(e_I), device=e_I.device))
    if len(open_I):
        e_I[open_I] = torch.fmax(floor_I[open_I] + 1, _below(w_HD, c_IH[open_I], form_IDD[open_I]))
    while len(open_I := unproved(open_I)):
        e_I[open_I] += 1
    return torch.fmax(floor_I, torch.fmin(e_I, above_I))


def _below(w_HD: Tensor, c_IH: Tensor, form_IDD: Tensor) -> Tensor:
    """Return exponents whose predecessors are too small, up to rounding: an estimate (I,) from below."""
    if form_IDD.numel() * form_IDD.shape[-1] <= DIRECT and bool(torch.isfinite(form_IDD).all()):
        return _exponent(torch.linalg.eigvalsh(form_IDD)[..., -1])
    start_ID = start_vectors(1, w_HD.shape[1]).to(w_HD).expand(len(c_IH), -1)
    size_I = c_IH.abs().amax(1).clamp_min(1e-300)
    share_IH = c_IH / size_I.unsqueeze(1)  # squares of c may overflow
    below_I = size_I * ritz(lambda v: (v @ w_HD.mT * share_IH) @ w_HD, start_ID, min(KRYLOV, w_HD.shape[1]))
    return _exponent(below_I)


def _exponent(value_I: Tensor) -> Tensor:
    return (value_I.clamp_min(0).log() / STEP - 1e-6).ceil()
