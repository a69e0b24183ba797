"""Lipschitz normalisation of attention (Dasoulas, Scaman, Virmaux 2021), per head and image.

    F(X) = sum_l softmax(Q K^T / c) V W_O^l,
    c = max(u v, u w, v w),     u = ||Q||_F,  v = max_j ||k_j||,  w = max_j ||v_j||

This is the paper's formula; the authors' code also divides the score by sqrt(D / H).
Letters: B images, N tokens, D width, H heads, O = D / H.
"""

import math

import torch
from torch import Tensor

from zoo.attention.lipschitz import global_layer
from zoo.attention.softmax import QKVAttention
from zoo.rules import Layer, rule

SMALLEST_C = 1e-12  # 0 / 0 where two of u, v, w vanish


class LipschitzNormAttention(QKVAttention):
    """x (B, N, D) -> (B, N, D). Options: those of `QKVAttention`."""

    def scores(self, q_BHNO: Tensor, k_BHNO: Tensor, v_BHNO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u_BH = torch.linalg.vector_norm(q_BHNO, dim=(-2, -1))
        v_BH, w_BH = (torch.linalg.vector_norm(rows, dim=-1).amax(-1) for rows in (k_BHNO, v_BHNO))
        c_BH = torch.maximum(u_BH * torch.maximum(v_BH, w_BH), v_BH * w_BH).clamp_min(SMALLEST_C)
        return q_BHNO / c_BH[..., None, None], k_BHNO, v_BHNO


VARIANTS = {"ln": LipschitzNormAttention}


@rule(LipschitzNormAttention)
def lipschitz_norm(module: LipschitzNormAttention) -> Layer:
    """Global: gains (1, 1 + kappa, 1 + sqrt(gamma)) on Q, K, V (see `global_layer`), (0, 0, 1) for N = 1, with

        kappa^2 = e^2 / (e^2 + N - 1),      gamma = min(N, 1 + 2 / sqrt(N) + (e^2 - 3) / N).

    Proof. Let a_i = ||q_i|| / u. As c >= u v: |s_ij| <= a_i, and sum_i a_i^2 = 1.
    (1) p_ij = 1 / (1 + sum_{l != j} exp(s_il - s_ij)) <= 1 / (1 + (N - 1) exp(-2 a_i)) <= kappa^2.
    (2) p_ij <= exp(2 a_i) / N, and exp(2 a) <= 1 + 2 a + (e^2 - 3) a^2 on [0, 1] (the remainder over a^2 is a power
    series with positive coefficients, so it is largest at 1). As sum_i a_i <= sqrt(N), the columns of P sum to at most
    gamma; its rows to 1. So ||P||^2 <= gamma.
    (3) dF_i = sum_j p_ij dv_j + Cov_{p_i}(ds_i, v) and ||Cov_{p_i}(ds_i, v)|| <= w sd_{p_i}(ds_i). So, with the
    seminorm |ds|^2 = sum_i Var_{p_i}(ds_i): ||dF|| <= sqrt(gamma) ||dV|| + w |ds|. Where c changes its form, and at
    zero norms, F is still locally Lipschitz, so it is enough to look at each form. With Q~ = Q / u, so that
    ||dQ~|| <= ||dQ|| / u:

        c = u v (v >= w, u >= w):  ds_ij = dq~_i . k_j / v + (q~_i . dk_j - s_ij dv) / v
        c = u w (w >= v, u >= v):  ds_ij = dq~_i . k_j / w + q~_i . dk_j / w - s_ij dw / w
        c = v w (v >= u, w >= u):  ds_ij = dq_i . k_j / (v w) + q_i . dk_j / (v w) - s_ij (dv / v + dw / w)
        c = SMALLEST_C:            ds_ij = dq_i . k_j / c + q_i . dk_j / c

    The terms of dq: sum_j p_ij (dq_i . k_j)^2 <= ||dq_i||^2 v^2, so w |.| <= ||dQ|| (in the four cases w v / (u v),
    w v / (u w), w v / (v w), w v / c, each <= 1). Those of dk: sum_i p_ij (q_i . dk_j)^2 <= kappa^2 u^2 ||dk_j||^2 by
    (1), so w |.| <= kappa ||dK|| (w / v, 1, u / v, u w / c, each <= 1). Those of s: |s|^2 <= sum_ij p_ij s_ij^2 <=
    (u v / c)^2, so w |.| <= (w / v) |dv|; (v / w) |dw|; (u / v) |dv| + (u / w) |dw|; and |dv| <= ||dK||,
    |dw| <= ||dV||. Altogether at most ||dQ|| + (1 + kappa) ||dK|| + (1 + sqrt(gamma)) ||dV||.

    Paper 000, eq. 41, has no W_V in it and is wrong already for N = 1, where F(X) = X W_V W_O.
    """

    def gains(n: int) -> tuple[float, float, float]:
        if n == 1:
            return 0.0, 0.0, 1.0
        e2 = math.e**2
        kappa = math.sqrt(e2 / (e2 + n - 1))
        gamma = min(n, 1 + 2 / math.sqrt(n) + (e2 - 3) / n)
        return 1.0, 1 + kappa, 1 + math.sqrt(gamma)

    return global_layer(module, gains)
