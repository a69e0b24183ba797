"""Gated positional self-attention of ConViT (d'Ascoli et al. 2021, eq. 6-7), around any variant of softmax/module.py.

    F(X) = merge( (1 - g) softmax(s q k^T) v + g R v ),   R = softmax(W_pos r),   g = sigmoid(gating) per head

r_ij = (dx, dy, dx^2 + dy^2) is the offset of patch j from patch i on their square grid. The second part is the same for
every image, and W_pos r is a function of dx plus one of dy, so that R is the Kronecker product of two small matrices,
R = Ry (x) Rx. For few tokens (1 - g) P + g R is written out and multiplies v once, which is 1.7 times as fast at 16
tokens. For more, the first part runs on the fused kernel, and the second takes 2 N sqrt(N) products per channel instead
of N^2.

Letters: B images, N tokens, D width, H heads, O = D / H, Y = X = sqrt(N) sides of the grid.
"""

import math
from dataclasses import replace
from functools import cache, partial

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from certizoo import UserError
from zoo.arithmetic import OUT, U
from zoo.attention.softmax.module import QKVAttention, SoftmaxAttention
from zoo.attention.softmax.qkv import Mixing, MixingError
from zoo.attention.softmax.rounding import attention_rounding
from zoo.attention.softmax.rules import AttentionRules, attention_rules, rules_with_mixing
from zoo.bounds.contracts import Precision, Rounding
from zoo.bounds.hypotheses import Shapes
from zoo.bounds.rounding import TINY
from zoo.bounds.rule_table import NoRule, expect, register

FEW = 64  # up to this many tokens all N^2 weights are written out; here both ways take the same time
LOST = 1e-11  # largest relative error of the weights of positions that certificates accept


@register_notrace_module  # the number of tokens decides its operations
class GPSA(nn.Module):
    """Gated attention, x (B, N, D) -> (B, N, D), N a square number of patches, no class token.

    `content` is the attention whose scores are mixed with positions. `locality_strength` says how sharply the heads
    attend to their patch at the start (the paper's alpha), `gating_init` is the start of the gating parameters (the
    paper's 1).
    """

    def __init__(self, content: nn.Module, locality_strength: float = 1.0, gating_init: float = 1.0) -> None:
        super().__init__()
        if not isinstance(content, SoftmaxAttention):
            raise UserError(f"{type(content).__name__} has no scores to mix with positions; choose a softmax attention")
        self.content = content
        self.locality_strength = locality_strength
        self.pos_proj = nn.Linear(3, content.num_heads)
        self.gating_param = nn.Parameter(torch.full((content.num_heads,), float(gating_init)))

    def forward(self, x_BND: Tensor) -> Tensor:
        q, k, v = self.content.heads(x_BND)
        way = self._written_out if v.shape[2] <= FEW else self._fused
        return self.content.merge(way(q, k, v))

    def _written_out(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.mixed((self.content.scale * q @ k.mT).softmax(-1)).to(v.dtype) @ v

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y_BHNO = F.scaled_dot_product_attention(q, k, v, scale=self.content.scale)
        g_H11 = self.gating_param.sigmoid()[:, None, None]
        return (1 - g_H11) * y_BHNO + g_H11 * self._positional(v)

    def _positional(self, v_BHNO: Tensor) -> Tensor:
        """Return R v, along one side of the grid after the other."""
        rx_HXX, ry_HYY = self.positions(v_BHNO.shape[2])
        v_BHYXO = v_BHNO.unflatten(2, (ry_HYY.shape[-1], -1))
        along_x = rx_HXX[:, None] @ v_BHYXO
        return (ry_HYY @ along_x.flatten(3)).reshape(v_BHNO.shape)

    def positions(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return Rx (H, X, X) and Ry (H, Y, Y) with R[(y, x), (y', x')] = Ry[y, y'] Rx[x, x']; rows sum to 1.

        Raises UserError if `tokens` is not a square.
        """
        side = math.isqrt(tokens)
        if side**2 != tokens:
            raise UserError(f"{tokens} tokens are not a square grid of patches; gated positions need a square image")
        weight_H3, bias_H = self.pos_proj.weight, self.pos_proj.bias
        steps = torch.arange(side, device=weight_H3.device, dtype=weight_H3.dtype)
        d = steps - steps[:, None]  # from row i to column j
        offset_XX2 = torch.stack([d, d.square()], dim=-1)
        # The bias moves whole rows, which the softmax drops; it is used so that it has its (zero) gradient.
        scores_x = F.linear(offset_XX2, weight_H3[:, [0, 2]], bias_H)
        scores_y = F.linear(offset_XX2, weight_H3[:, [1, 2]])
        return scores_x.movedim(-1, 0).softmax(-1), scores_y.movedim(-1, 0).softmax(-1)

    def mixed(self, p_BHNN: Tensor) -> Tensor:
        """Return (1 - g) P + g R for all pairs of tokens."""
        r_HNN = _pairs(*self.positions(p_BHNN.shape[-1]))
        g_H11 = self.gating_param.sigmoid()[:, None, None]
        return (1 - g_H11) * p_BHNN + g_H11 * r_HNN

    @torch.no_grad()
    def finish_init(self) -> None:
        """Apply the paper's local start: W_V = I where the content has plain values, and heads that attend locally.

        Head h attends to its own patch of a sqrt(H) x sqrt(H) neighbourhood, at centre c: score = alpha (2 c . (dx, dy)
        - dx^2 - dy^2).
        """
        if isinstance(self.content, QKVAttention):
            nn.init.eye_(self.content.qkv.weight.chunk(3)[2])
        weight_H3 = self.pos_proj.weight
        side = math.isqrt(len(weight_H3))
        middle = (side - 1) / 2 if side % 2 == 0 else side // 2
        for head in range(side**2):
            cy, cx = head % side - middle, head // side - middle
            weight_H3[head] = torch.tensor([2 * cx, 2 * cy, -1.0])
        weight_H3 *= self.locality_strength


def _pairs(rx_HXX: Tensor, ry_HYY: Tensor) -> Tensor:
    """Return Ry[y, y'] Rx[x, x'] of all pairs of tokens (H, N, N)."""
    return (ry_HYY[:, :, None, :, None] * rx_HXX[:, None, :, None, :]).flatten(3).flatten(1, 2)


def _rules(module: GPSA) -> AttentionRules:
    """Return Theorem 1 of LoFAST with P~ = (1 - g) P + g R for P.

        P~' X' - P~ X = P~ (X' - X) + (1 - g) (P' - P) X',

    so zeta is that of P~, and the change of P counts (1 - g)-fold. Rows of P~ sum to 1. g R X M is linear: the
    remainder is that of (1 - g) P X M. docs/proofs.md#gpsa.
    """
    return rules_with_mixing(module, module.content, mixing(module))


def mixing(module: GPSA) -> Mixing:
    """Return the mixing (1 - g) P + g R. Raises NoRule where float64 cannot hold R."""
    expect(module.pos_proj, nn.Linear)
    share_H = (-module.gating_param.detach()).sigmoid()

    @cache
    def refuse_lost(tokens: int) -> None:
        off_HNN = _mixing_error(module, Precision(U, U), tokens).constants
        if not bool((off_HNN <= LOST * _pairs(*module.positions(tokens)) + 2 * TINY).all()):
            raise NoRule(module, "float64 cannot hold the weights of its positions: those of pos_proj are too large")

    def mix(p_BHNN: Tensor) -> Tensor:
        refuse_lost(p_BHNN.shape[-1])
        return module.mixed(p_BHNN)

    return Mixing(mix=mix, gain_H=share_H, rounding=partial(_mixing_error, module))


def _mixing_error(module: GPSA, precision: Precision, tokens: int) -> MixingError:
    """Bound the rounding of the mixing.

    delta bounds the error of g and of 1 - g. For 1 / (1 + exp) it is a quarter of the error of exp, for (1 + tanh) / 2
    half of that of tanh, each with two roundings. R is a product of two softmaxes. A few products and a sum follow.
    """
    rx_HXX, ry_HYY = module.positions(tokens)
    weight_H3, bias_H = module.pos_proj.weight.detach().double(), module.pos_proj.bias.detach().double()
    x_HXX = _along(rx_HXX, weight_H3[:, [0, 2]], bias_H, precision)
    y_HYY = _along(ry_HYY, weight_H3[:, [1, 2]], torch.zeros_like(bias_H), precision)
    delta = 24 * precision.sums + 3 * precision.u
    r_HNN = _pairs(rx_HXX, ry_HYY)
    off_HNN = _pairs(rx_HXX + x_HXX, ry_HYY + y_HYY) - r_HNN
    g_H11 = module.gating_param.detach().sigmoid()[:, None, None]
    return MixingError(roundings=10, delta=delta, constants=(g_H11 + delta) * off_HNN + delta * r_HNN + TINY)


def _along(r_HXX: Tensor, weight_H2: Tensor, bias_H: Tensor, precision: Precision) -> Tensor:
    """Bound the error of the entries of a softmax of a d + b d^2 + c.

    tau bounds the error of a score, a share of the moduli of its terms, so an exponential changes by a factor within
    e^tau. nu is the resulting relative error of the sum.
    """
    gamma, u, side = precision.gamma, precision.u, r_HXX.shape[-1]
    steps = torch.arange(side).to(r_HXX)
    d_XX = (steps - steps[:, None]).abs()
    moduli_HXX = F.linear(torch.stack([d_XX, d_XX.square()], dim=-1), weight_H2.abs(), bias_H.abs()).movedim(-1, 0)
    tau_HXX = (gamma(6) + 4 * u) * moduli_HXX
    nu_HX1 = (r_HXX * tau_HXX.expm1()).sum(-1, keepdim=True)
    share_HXX = tau_HXX.exp() * (1 + gamma(3 * side + 100) + 4 * u) / (1 - nu_HX1) - 1
    return torch.where(nu_HX1 < 0.5, r_HXX * share_HXX * OUT, math.inf)


def gpsa_shapes(module: GPSA) -> Shapes:
    """Return a gate, and weights for the three numbers of an offset, per head."""
    heads = module.content.num_heads
    return {"gating_param": (heads,), "pos_proj.weight": (heads, 3), "pos_proj.bias": (heads,)}


def rounding(module: GPSA, precision: Precision) -> Rounding:
    """Return the rounding of the content and of the positions."""
    return attention_rounding(module.content, mixing(module), precision)


register(GPSA, replace(attention_rules(_rules, gpsa_shapes), rounding=rounding))
