"""How far the output of a module that is served in float32 or bfloat16 is from that of its float64 function.

x' is an input of the served module, x^ what one of its parts has instead of x', x the clean one,

    ||x' - x||_F <= r,        ||x^ - x'||_F <= e        (radius of the ball, and rounding so far; tokens together),

and `rounding(module, u)(x) -> Part(y, radius(r), error(r, e))`, where `radius` is the rule of `zoo.bounds.rules`, and
`error` bounds what the module makes of e and adds itself. With u the unit round-off of the type, a = 2^-24 that of
its sums and gamma_k = k a / (1 - k a), a matrix product with K terms has, whatever the order of its sum,

    |fl(W x + b) - (W x + b)| <= gamma_{K+2} (|W| |x| + |b|) + u |W x + b|        (Higham 2002, section 3.5).

Assumed of the kernels: sums in float32, also for bfloat16, and one rounding at the end of each operation; no TF32, no
Winograd; exp, erf and tanh within 40 u. Weights are those served. Source: MATH-PROOFS.md section 3.

Letters: B images, J classes, N tokens, D width, H heads; r and e (..., B).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from zoo.attention.dot_product import DotProductAttention
from zoo.bounds.rules import GELU_SLOPE, Bound, NoRule, layer_of
from zoo.layers.block import NormFirstBlock, PreNormBlock
from zoo.layers.mlp import SLL, Mlp
from zoo.layers.norms import LayerProject, SmoothProject
from zoo.models.vit import ViT
from zoo.spectral import sigma_upper

# Twice those of rounding to nearest for bfloat16, whose kernels may round a second time on the way.
UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
SUMS = 2.0**-24
OUT = 1 + 1e-9  # outwards over the rounding of these formulas themselves
TINY = 1e-30  # over underflow
NONE = "no bound of its rounding is written; certify with served_dtype=null"
Error = Callable[[Tensor, Tensor], Tensor]  # r (B,), e (B,) -> e (B,)


@dataclass(frozen=True)
class Part:
    """One module around a clean batch."""

    y: Tensor
    radius: Bound
    error: Error


Rounding = Callable[[Tensor], Part]
_RULES: dict[type[nn.Module], Callable[..., Rounding]] = {}


def rounding(*kinds: type[nn.Module]) -> Callable[[Callable[..., Rounding]], Callable[..., Rounding]]:
    """Enter the decorated `rule(module, u)` into the table for these exact types."""

    def enter(function: Callable[..., Rounding]) -> Callable[..., Rounding]:
        _RULES.update(dict.fromkeys(kinds, function))
        return function

    return enter


def rounding_of(module: nn.Module, u: float) -> Rounding:
    """The rule of `module`. Raises `NoRule`."""
    if type(module) not in _RULES:
        raise NoRule(module, NONE)
    return _RULES[type(module)](module, u)


def _gamma(k: int) -> float:
    return k * SUMS / (1 - k * SUMS)


def _size(x: Tensor) -> Tensor:
    """||x||_F per image: (B,)."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1)


def _longest(x: Tensor) -> Tensor:
    """The longest row of every image, (B, ..., D) -> (B,)."""
    return torch.linalg.vector_norm(x, dim=-1).flatten(1).amax(1)


@dataclass(frozen=True)
class Affine:
    """x W^T + b on tokens: its norm, that of |W|, and what it adds to an error."""

    norm: Tensor
    absolute: Tensor
    bias: float
    terms: int
    u: float

    def size(self, size_B: Tensor, tokens: int) -> Tensor:
        """||x W^T + b||_F for ||x||_F <= size."""
        return self.norm * size_B + self.bias * math.sqrt(tokens)

    def error(self, size_B: Tensor, e_B: Tensor, tokens: int) -> Tensor:
        """||W|| e + (gamma_{K+2} + u) (|||W||| ||x^|| + ||b||)."""
        mine = self.absolute * (size_B + e_B) + self.bias * math.sqrt(tokens)
        return (self.norm * e_B + (_gamma(self.terms + 2) + self.u) * mine) * OUT + TINY


def affine(weight_OI: Tensor, bias_O: Tensor | None, u: float) -> Affine:
    length = 0.0 if bias_O is None else float(torch.linalg.vector_norm(bias_O.detach().double()))
    return Affine(sigma_upper(weight_OI), sigma_upper(weight_OI.abs()), length, weight_OI.shape[1], u)


# the model ------------------------------------------------------------------------------------------------------------


def nodes_of_model(model: nn.Module, u: float) -> list[Rounding]:
    """One rule for every node of `zoo.bounds.curvature.trunk_of`, in its order. Raises `NoRule`."""
    if type(model) is not ViT:
        raise NoRule(model, NONE)
    blocks = [_nodes(block, u) for block in model.blocks]
    if model.cls_after:
        blocks.insert(model.cls_after, [lambda x: Part(model.add_cls_token(x), lambda r: r, lambda r, e: e)])
    found = [_embedding(model, u), *(node for block in blocks for node in block), rounding_of(model.norm, u)]
    found.append(_pooling(model, u))
    if type(model.fc_norm) is not nn.Identity:
        found.append(_of_one_token(rounding_of(model.fc_norm, u)))
    return found


def head_error(head: nn.Linear, x_BD: Tensor, u: float) -> Callable[[Tensor], Tensor]:
    """r (B,) -> |fl(m_j) - m_j| (B, J) for the margin of any label over j, of what the head adds itself."""
    length_J = torch.linalg.vector_norm(head.weight, dim=1)
    bias_J = torch.zeros_like(length_J) if head.bias is None else head.bias.abs()
    x_B = torch.linalg.vector_norm(x_BD, dim=1)

    def error(r: Tensor) -> Tensor:
        size_BJ = length_J * (x_B + r)[:, None] + bias_J
        logit_BJ = (_gamma(head.in_features + 2) + u) * size_BJ * OUT + TINY
        return logit_BJ + logit_BJ.amax(1, keepdim=True)

    return error


def _embedding(model: ViT, u: float) -> Rounding:
    """(x - mean) / std, a product with the patches, positions. The image is cast to the type first."""
    conv = model.patch_embed.get_submodule("proj")
    assert isinstance(conv, nn.Conv2d)
    std = float(model.normalize.get_buffer("std").min())
    patches = affine(conv.weight.flatten(1), conv.bias, u)
    whole = affine((conv.weight / model.normalize.get_buffer("std")).flatten(1), None, u)

    def part(x_BCHW: Tensor) -> Part:
        z, y = model.get_submodule("normalize")(x_BCHW), model.embed(x_BCHW)
        x_B, z_B, y_B = _size(x_BCHW), _size(z), _size(y)

        def error(r: Tensor, e: Tensor) -> Tensor:
            size = z_B + r / std
            cast = 0.0 if u == SUMS else u * (x_B + r) / std  # float32 images are what they are
            into = patches.error(size, 4 * u * size + cast + e / std, y.shape[1])
            return (into + 2 * u * (y_B + whole.norm * r + into)) * OUT + TINY

        return Part(y, lambda r: whole.norm * r, error)

    return part


def _pooling(model: ViT, u: float) -> Rounding:
    """The mean of N tokens, or the class token, which is no computation."""

    def part(x_BND: Tensor) -> Part:
        if model.global_pool != "avg":
            return Part(model.pool(x_BND), lambda r: r, lambda r, e: e)
        many, x_B = x_BND.shape[1], _size(x_BND)
        share = many**-0.5

        def error(r: Tensor, e: Tensor) -> Tensor:
            return share * (e + (_gamma(many + 2) + 2 * u) * (x_B + r + e)) * OUT

        return Part(model.pool(x_BND), lambda r: share * r, error)

    return part


def _of_one_token(inner: Rounding) -> Rounding:
    def part(x_BD: Tensor) -> Part:
        found = inner(x_BD.unsqueeze(1))
        return Part(found.y.squeeze(1), found.radius, found.error)

    return part


def _residual(branch: list[Rounding], u: float) -> Rounding:
    """x + branch(x), and the rounding of the sum."""

    def part(x: Tensor) -> Part:
        inner, y = [], x
        for rule in branch:
            inner.append(rule(y))
            y = inner[-1].y
        x_B, y_B = _size(x), _size(y)

        def through(r: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
            for one in inner:
                r, e = one.radius(r), one.error(r, e)
            return r, e

        def error(r: Tensor, e: Tensor) -> Tensor:
            r_b, e_b = through(r, e)
            return (e + e_b + u * (x_B + r + e + y_B + r_b + e_b)) * OUT

        return Part(x + y, lambda r: r + through(r, torch.zeros_like(r))[0], error)

    return part


def _nodes(block: nn.Module, u: float) -> list[Rounding]:
    """As `nodes_of` splits them: two residual sums; or norm, residual attention, norm, MLP."""
    if type(block) is PreNormBlock:
        halves = ((block.norm1, block.attn, block.scale1), (block.norm2, block.mlp, block.scale2))
        return [_residual([rounding_of(part, u) for part in (*half, block.drop_path)], u) for half in halves]
    if type(block) is NormFirstBlock:
        summed = _residual([rounding_of(block.attn, u), rounding_of(block.drop_path, u)], u)
        return [rounding_of(block.norm1, u), summed, rounding_of(block.norm2, u), rounding_of(block.mlp, u)]
    raise NoRule(block, NONE)


# modules --------------------------------------------------------------------------------------------------------------


@rounding(nn.Identity, nn.Dropout, DropPath)
def identity(module: nn.Module, u: float) -> Rounding:
    """Nothing is computed in eval mode."""
    return lambda x: Part(x, lambda r: r, lambda r, e: e)


@rounding(SmoothProject, LayerProject)
def projection(module: Any, u: float) -> Rounding:
    """1-Lipschitz; x times a factor from sums of squares, without cancellation: relative errors add up."""
    layer = layer_of(module)

    def part(x: Tensor) -> Part:
        y, radius = layer(x)
        x_B, most = _size(x), module.radius * math.sqrt(x[0].numel() / x.shape[-1])

        def error(r: Tensor, e: Tensor) -> Tensor:
            return (e + (_gamma(x.shape[-1] + 8) + 8 * u) * (x_B + r + e).clamp(max=1.01 * most)) * OUT

        return Part(y, radius, error)

    return part


@rounding(nn.LayerNorm)
def layer_norm(module: nn.LayerNorm, u: float) -> Rounding:
    """gamma sqrt(d) c / t + beta, c = x - mean, t^2 = |c|^2 + d eps >= low^2 on the ball. ||D|| <= gamma sqrt(d) / low.

    The variance is off by gamma_{2d+10} |x|^2 / d at most (even as a difference of moments), that is t by a share rho;
    mean and difference by gamma_{d+6} 2 |x|.
    """
    layer, (dim,) = layer_of(module), module.normalized_shape
    gain = math.sqrt(dim) * (1.0 if module.weight is None else float(module.weight.detach().abs().max()))
    beta = 0.0 if module.bias is None else float(torch.linalg.vector_norm(module.bias.detach()))

    def part(x_BND: Tensor) -> Part:
        y, radius = layer(x_BND)
        length_BN = torch.linalg.vector_norm(x_BND, dim=-1)
        t_BN = ((x_BND - x_BND.mean(-1, keepdim=True)).square().sum(-1) + dim * module.eps).sqrt()
        tokens, floor = length_BN.shape[1], math.sqrt(dim * module.eps)

        def error(r: Tensor, e: Tensor) -> Tensor:
            low_BN = (t_BN - (r + e).unsqueeze(-1)).clamp_min(floor)
            share_B = ((length_BN + (r + e).unsqueeze(-1)) / low_BN).amax(-1)  # |x| / t
            rho_B = _gamma(2 * dim + 10) * share_B.square()
            rho_B = torch.where(rho_B <= 0.3, rho_B + 4 * SUMS, math.inf)
            own_B = rho_B + 2 * (1 + rho_B) * _gamma(dim + 6) * share_B + 4 * u
            return (gain * e / low_BN.amin(-1) + math.sqrt(tokens) * (gain * own_B + 4 * u * beta)) * OUT

        return Part(y, radius, error)

    return part


SLOPES: dict[type[nn.Module], Callable[[Any], float]] = {
    nn.GELU: lambda act: GELU_SLOPE[act.approximate],
    nn.ReLU: lambda act: 1.0,
    nn.Tanh: lambda act: 1.0,
}


def _slope(act: nn.Module) -> float:
    if type(act) not in SLOPES:
        raise NoRule(act, NONE)
    return SLOPES[type(act)](act)


@rounding(Mlp)
def mlp(module: Mlp, u: float) -> Rounding:
    """fc2(act(fc1 x)); |act(z)| <= |z|, computed within 80 sums' round-offs and one of the type, of |z|."""
    if type(module.norm) is not nn.Identity:
        raise NoRule(module.norm, "an Identity was expected inside the MLP")
    layer, slope = layer_of(module), _slope(module.act)
    first, second = (affine(fc.weight, fc.bias, u) for fc in (module.fc1, module.fc2))

    def part(x_BND: Tensor) -> Part:
        y, radius = layer(x_BND)
        x_B, tokens = _size(x_BND), x_BND.shape[1]

        def error(r: Tensor, e: Tensor) -> Tensor:
            size, e_1 = first.size(x_B + r, tokens), first.error(x_B + r, e, tokens)
            return second.error(size, slope * e_1 + (80 * SUMS + u) * (size + e_1), tokens)

        return Part(y, radius, error)

    return part


@rounding(SLL)
def sll(module: SLL, u: float) -> Rounding:
    """x - 2 T^{-1} W act(W^T x + b): 1-Lipschitz for e; T is off by the share rho, its terms |W^T W| by gamma_{d+H+20}
    of |W|^T |W|."""
    layer = layer_of(module)
    _slope(module.act)
    weight, q = module.weight.detach().double(), module.log_q.detach().double().exp()
    t_H = module.diagonal_H().detach().double()
    most_H = ((weight.abs().mT @ weight.abs()) * q).sum(1) / q
    rho = float(((_gamma(sum(weight.shape) + 20) + 8 * u) * most_H / t_H).amax())
    up = affine(weight.mT, module.bias, u)
    down = affine(2 * weight / t_H, None, u)

    def part(x_BND: Tensor) -> Part:
        y, radius = layer(x_BND)
        x_B, tokens = _size(x_BND), x_BND.shape[1]

        def error(r: Tensor, e: Tensor) -> Tensor:
            size = x_B + r + e
            z, none = up.size(size, tokens), torch.zeros_like(e)
            e_1 = up.error(size, none, tokens) + (80 * SUMS + u) * z
            e_2 = down.error(z, e_1 + 1.01 * (rho / max(1e-300, 1 - rho) + 2 * u) * z, tokens)
            return torch.where(torch.tensor(rho < 0.5), e + e_2 + u * (size + down.size(z, 0)) * 2, math.inf) * OUT

        return Part(y, radius, error)

    return part


@rounding(DotProductAttention)
def attention(module: DotProductAttention, u: float) -> Rounding:
    """Scores are off by tau, so that P is within the factor exp(2 tau) (1 + gamma); a row of P times V is then off by

        sum_j P_ij |v^_j - v_j| + omega max_j |v^_j|,        omega = exp(2 tau) (1 + gamma_{3N+200} + 4 u) - 1,

    and ||P (v^ - v)||_F <= sqrt(N) ||v^ - v||_F, as rows of P sum to 1.
    """
    layer, heads = layer_of(module), module.num_heads
    width = module.qkv.in_features // heads
    weights = module.qkv.weight.chunk(3)
    biases = (None,) * 3 if module.qkv.bias is None else module.qkv.bias.chunk(3)
    q, k, v = (affine(w, b, u) for w, b in zip(weights, biases, strict=True))
    out = affine(module.proj.weight, module.proj.bias, u)
    scale = abs(module.scale)

    def part(x_BND: Tensor) -> Part:
        y, radius = layer(x_BND)
        q_B, k_B, v_B = (_longest(t) for t in module.projections(x_BND))
        x_B, tokens = _size(x_BND), x_BND.shape[1]
        rows = math.sqrt(tokens * heads)

        def error(r: Tensor, e: Tensor) -> Tensor:
            e_q, e_k, e_v = (one.error(x_B + r, e, tokens) for one in (q, k, v))
            long_q, long_k, long_v = q_B + q.norm * r, k_B + k.norm * r, v_B + v.norm * r
            product = (long_q + e_q) * (long_k + e_k)
            tau = scale * (e_q * long_k + (long_q + e_q) * e_k + (_gamma(width + 4) + 2 * u) * product)
            omega = torch.expm1(2 * tau) + torch.exp(2 * tau) * (_gamma(3 * tokens + 200) + 4 * u)
            e_o = math.sqrt(tokens) * e_v + rows * (long_v + e_v) * (omega + _gamma(tokens + 4) + 2 * u)
            return out.error(rows * long_v, e_o, tokens)

        return Part(y, radius, error)

    return part
