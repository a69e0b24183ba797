"""Local rules of first and second order for dot-product attention, also with mixing around its softmax.

Queries, keys and values come from one X and move together: theory/joint.py.

Letters: B images, C classes, N tokens, D width, H heads (l), O = D / H (dh).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo.arithmetic import nan_to_inf
from zoo.attention.lofast import SOFTMAX, zeta
from zoo.attention.softmax.computed import errors_of
from zoo.attention.softmax.module import QKVAttention
from zoo.attention.softmax.parts import core_leaf, join_heads, merge_leaf, projection_leaf, split_heads
from zoo.attention.softmax.qkv import widened
from zoo.attention.theory.core import QKVRadii
from zoo.attention.theory.joint import Heads, JointCore, measure, same
from zoo.attention.theory.score_errors import Inexact
from zoo.bounds.contracts import Bound, Expand, Expansion, Layer
from zoo.bounds.first_order import added
from zoo.bounds.products import chained
from zoo.bounds.rule_table import expect
from zoo.spectral import product_rounding, sigma_upper


def heads_of(content: QKVAttention, gain_H: Tensor | float = 1.0) -> Heads:
    """Return the weights of `content`, whose scores are s q k^T plus constants."""
    expect(content.qkv, nn.Linear)
    expect(content.proj, nn.Linear)
    qkv_3HOD = content.head_weights_3HOD().detach().double()
    o_HOD = content.proj.weight.detach().double().unflatten(1, (content.num_heads, -1)).permute(1, 2, 0).contiguous()
    gain_H = torch.as_tensor(gain_H, dtype=o_HOD.dtype, device=o_HOD.device).expand(len(o_HOD))
    return measure(content.scale, qkv_3HOD, o_HOD, gain_H)


def inexact_of(
    content: QKVAttention,
    core: JointCore,
    plain: Heads,
    x_BND: Tensor,
    v: Tensor,
    attend: Callable[[Tensor], Tensor],
    mix: Callable[[Tensor], Tensor],
) -> tuple[Inexact, Bound]:
    """Return the cost of errors in the computed core, and its bound after W_O for tokens that move by r.

    `plain` has no gain.
    """

    def rows(x: Tensor) -> Tensor:
        return torch.stack(content.projections(x))

    s_BHNN = content.scale * core.q @ core.k.mT
    off = errors_of(x_BND, rows, core.score, torch.stack([core.q, core.k, v]), s_BHNN, attend, core.p, mix)
    inexact = Inexact(core, v, off)

    def behind(r: Tensor) -> Tensor:
        moved = QKVRadii(plain.norm_q * r, plain.norm_k * r, plain.norm_v * r)
        return plain.norm_o * inexact.norm(same(r), moved)

    return inexact, behind


def lofast_local(
    module: Callable[[Tensor], Tensor],
    content: QKVAttention,
    residual: bool,
    attend: Callable[[Tensor], Tensor] = SOFTMAX,
    mix: Callable[[Tensor], Tensor] = lambda p_BHNN: p_BHNN,
    gain_H: Tensor | float = 1.0,
) -> Layer:
    """Return the rule ||F(X') - F(X)|| <= zeta r + delta_2, with delta_2 >= ||(P' - P) X'||.

    delta_2 is the least of

        ||W_O|| E1(tau) [ r U_n + r^2 T_n + ||W_V|| r (r U_p + r^2 T_p) ],
        ||W_O|| sqrt( sum_l (lam_l |dS_l| (||V_c,l|| + ||W_V,l|| r))^2 ),
        sum_l lam_l |dS_l| (||V_c,l W_O,l|| + ||M_l|| r)

    where (U, T)_n and (U, T)_p are the seminorm bounds for the weights nu_il^2 p_ilk and max_k(p_ilk) p_ilk, lam the
    slope of the softmax on the box that the scores can reach, V_c = V - its mean. Proof of the first: a row of (P' - P)
    V is the integral of Cov_t(delta, v), at most E1(tau) sd(delta) nu. docs/proofs.md#attention-radius.

    `module` is `content` or attention around it with P = mix(attend(S)): attend(S) is the softmax of S plus constants,
    `mix` an affine map of each head with the linear part `gain_H`.
    """
    heads, plain = heads_of(content, gain_H), heads_of(content)
    m_HDD = content.head_weights_3HOD()[2].detach().double().mT @ heads.o_HOD
    off_m_H = product_rounding(content.head_weights_3HOD()[2].detach().double().mT, heads.o_HOD)
    norm_m_H = sigma_upper(m_HDD) + off_m_H

    def layer(x_BND: Tensor) -> tuple[Tensor, Bound]:
        q, k, v = content.projections(x_BND)
        p_BHNN = attend(content.scale * q @ k.mT)
        mixed = mix(p_BHNN)
        core, zeta_B = JointCore(heads, q, k, v, p_BHNN, mixed), zeta(mixed, m_HDD, norm_m_H, residual, off_m_H)
        _, off = inexact_of(content, core, plain, x_BND, v, attend, mix)
        y = module(x_BND)
        return (added(x_BND, y) if residual else y), lambda r: nan_to_inf(zeta_B * r + core.moved(same(r)) + off(r))

    return layer


def expand_attention(
    module: Callable[[Tensor], Tensor],
    content: QKVAttention,
    attend: Callable[[Tensor], Tensor] = SOFTMAX,
    mix: Callable[[Tensor], Tensor] = lambda p_BHNN: p_BHNN,
    gain_H: Tensor | float = 1.0,
) -> Expand:
    """Expand `content`, or attention around it; arguments as in `lofast_local`.

    Where P = mix of a softmax, the remainder sees the values `gain_H`-fold, and J the mixed P.
    """
    heads, plain = heads_of(content, gain_H), heads_of(content)
    qkv_HOD = torch.cat([heads.q_HOD, heads.k_HOD, plain.v_HOD])  # 3 H heads: one product instead of three

    def expand(x_BND: Tensor) -> Expansion:
        q, k, v = content.projections(x_BND)
        p_BHNN = attend(content.scale * q @ k.mT)
        mixed = mix(p_BHNN)
        core, norm_p_BH = JointCore(heads, q, k, v, p_BHNN, mixed), sigma_upper(mixed)
        through_values = torch.minimum(norm_p_BH.amax(-1) * plain.norm_v * plain.norm_o, norm_p_BH @ plain.norm_m_H)
        inexact, off = inexact_of(content, core, plain, x_BND, v, attend, mix)
        through_scores = core.linear(same(torch.ones_like(through_values)))

        def remainder(g_CBND: Tensor) -> Bound:
            of_core = core.remainder(split_heads(g_CBND, heads.o_HOD))
            return lambda r: of_core(same(r))

        def pull(g_CBND: Tensor) -> Tensor:
            """Return J^T g."""
            return join_heads(torch.cat(core.pull(split_heads(g_CBND, heads.o_HOD)), dim=-3), qkv_HOD)

        def push(v_CBND: Tensor) -> Tensor:
            """Return J v."""
            return join_heads(core.push(*split_heads(v_CBND, qkv_HOD).chunk(3, dim=-3)), heads.o_HOD)

        y_BND = module(x_BND)
        parts = (
            projection_leaf(torch.stack([q, k, v], 1), qkv_HOD.unflatten(0, (3, -1))),
            core_leaf(core, v, inexact),
            merge_leaf(y_BND, heads.o_HOD),
        )
        computed = Expansion(
            y=y_BND,
            gain_B=through_values + through_scores,
            beta=lambda r: core.beta(same(r)),
            remainder=remainder,
            pull=pull,
            own_push=push,
            rounding_B=chained(parts),
            parts=parts,
        )
        return widened(computed, off)

    return expand
