"""From a bound on attention as a map of (Q, K, V) to a bound on it as a map of X, for any number of heads.

Letters: N tokens, D width, H heads.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo.attention.softmax.module import QKVAttention
from zoo.bounds.contracts import Bound, Layer
from zoo.bounds.rule_table import expect
from zoo.spectral import sigma_upper

SMALLEST = 1e-300  # keeps a constant of 0 from making NaN of an infinite radius


def global_layer(module: QKVAttention, gains: Callable[[int], tuple[float, float, float]]) -> Layer:
    """Return a global rule, given that every head satisfies ||dF_h|| <= a ||dQ_h|| + b ||dK_h|| + c ||dV_h||.

    With (a, b, c) = gains(N),

        Lip <= min( a ||W_Q|| + b ||W_K|| + c ||W_V||,  sqrt(a^2 + b^2 + c^2) ||[W_Q W_K W_V]|| ) ||W_O||

    with the matrices of all heads together. Proof: the heads are concatenated, so ||dF||^2 = sum_h ||dF_h||^2, and by
    Minkowski ||dF|| <= a ||dQ|| + b ||dK|| + c ||dV||, where ||dQ||^2 = sum_h ||dQ_h||^2 = ||dX W_Q||^2 <= ||W_Q||^2
    ||dX||^2: the heads share one budget. The second form is Cauchy-Schwarz and ||dQ||^2 + ||dK||^2 + ||dV||^2 = ||dX
    [W_Q W_K W_V]||^2. Biases drop out.

    Proof: docs/proofs.md#shared-budget.
    """
    expect(module.qkv, nn.Linear)
    expect(module.proj, nn.Linear)
    weight = module.qkv.weight.detach()
    norms_3, norm = sigma_upper(weight.unflatten(0, (3, -1))), sigma_upper(weight)
    norm_o = sigma_upper(module.proj.weight)

    def layer(x_BND: Tensor) -> tuple[Tensor, Bound]:
        gains_3 = torch.tensor(gains(x_BND.shape[-2]), dtype=norms_3.dtype).to(norms_3)
        lipschitz = torch.minimum((gains_3 * norms_3).sum(), gains_3.norm() * norm) * norm_o
        return module(x_BND), lambda r: lipschitz.clamp_min(SMALLEST) * r

    return layer
