"""LoFAST's rule for dot-product attention with local constants: the softmax where it is, heads sharing one budget.

Letters: B images, N tokens, D width, H heads (l).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from zoo.arithmetic import known
from zoo.attention.lofast import SOFTMAX, zeta
from zoo.attention.softmax import QKVAttention
from zoo.attention.spread import Spread, e1, exponential, grow, measure
from zoo.bounds.rules import Bound, Layer
from zoo.spectral import sigma_upper


def lofast_local(
    module: Callable[[Tensor], Tensor],
    content: QKVAttention,
    residual: bool,
    attend: Callable[[Tensor], Tensor] = SOFTMAX,
    mix: Callable[[Tensor], Tensor] = lambda p_BHNN: p_BHNN,
    gain_H: Tensor | float = 1.0,
) -> Layer:
    """||F(X') - F(X)|| <= zeta r + delta_2, with delta_2 >= ||(P' - P) X'||: the least of

        ||W_O|| E1(tau) [ r U_n + r^2 T_n + ||W_V|| r (r U_p + r^2 T_p) ],
        ||W_O|| sqrt( sum_l (lam_l |dS_l| (||V_c,l|| + ||W_V,l|| r))^2 ),
        sum_l lam_l |dS_l| (||V_c,l W_O,l|| + ||M_l|| r)

    where (U, T)_n and (U, T)_p are the levels of Spread for the weights nu_il^2 p_ilk and max_k(p_ilk) p_ilk, lam the
    slope of the softmax on the box that the scores can reach, V_c = V - its mean. Proof of the first: a row of
    (P' - P) V is the integral of Cov_t(delta, v), at most E1(tau) sd(delta) nu. MATH-PROOFS.md section 2.9.

    `module` is `content` or attention around it with P = mix(attend(S)): attend(S) the softmax of S plus constants,
    `mix` an affine map of each head with the linear part `gain_H`.
    """
    heads = measure(content, gain_H)
    m_HDD = content.head_weights_3HOD()[2].detach().double().mT @ heads.o_HOD
    norm_m_H = sigma_upper(m_HDD)

    def layer(x_BND: Tensor) -> tuple[Tensor, Bound]:
        q, k, v = content.projections(x_BND)
        p_BHNN = attend(content.scale * q @ k.mT)
        change = changes(Spread(heads, q, k, v, p_BHNN))
        zeta_B = zeta(mix(p_BHNN), m_HDD, norm_m_H, residual)
        y = module(x_BND)
        return (x_BND + y if residual else y), lambda r: known(zeta_B * r + change(r))

    return layer


def changes(spread: Spread) -> Bound:
    """delta_2."""
    heads = spread.heads
    by_values, by_inputs = spread.by_values, spread.by_inputs
    norm_v = heads.norm_v_H.amax()

    def bound(r: Tensor) -> Tensor:
        spreads = grow(by_values, r) + norm_v * r * grow(by_inputs, r)
        smooth = heads.norm_o * exponential(lambda t: e1(t) * spreads, spread.tau(r))
        change_H = spread.weights(r)
        return torch.minimum(known(smooth), known(spread.combined(change_H, change_H * r.unsqueeze(-1))))

    return bound
