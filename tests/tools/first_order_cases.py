"""Modules, inputs and radii on which first-order rules are attacked: at least 200 instances of every type."""

from collections.abc import Callable
from functools import partial

import torch
from timm.layers import DropPath
from timm.models.swin_transformer import PatchMerging, SwinTransformerBlock, SwinTransformerStage
from torch import Tensor, nn

from tests.tools.ascent import largest_change
from tests.tools.attention_cases import masked
from zoo import create_model
from zoo.attention.conv_mixing import ConvMixing
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.gpsa import GPSA
from zoo.attention.l2 import L2Attention
from zoo.attention.lipschitz_norm import LipschitzNormAttention
from zoo.attention.masked import MaskedAttention
from zoo.attention.scsa import ScaledCosineAttention
from zoo.attention.window import WindowAttention
from zoo.bounds.first_order import layer_of, residual_layer_of
from zoo.layers.block import NormFirstBlock, PostNormBlock, PreNormBlock
from zoo.layers.convolution import CellConv2d, CircularConv2d
from zoo.layers.mlp import SLL, ConstrainedMlp, Mlp
from zoo.layers.monotone import MonotoneGELU
from zoo.layers.norms import CenterNorm, LayerProject, SmoothProject
from zoo.layers.patches import Normalize
from zoo.layers.residual import WeightedResidual
from zoo.models.convnet import ReLUx

N, D, H = 5, 12, 3
MODULES, INPUTS = 10, 20
Make = Callable[[float], nn.Module]


def scaled_(module: nn.Module, scale: float) -> nn.Module:
    """Draw weights of a random size, so that curvature and saturation both occur."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * scale * parameter.shape[-1] ** -0.5)
    return module


def norm_with_affine(scale: float, dim: int = D) -> nn.LayerNorm:
    norm = nn.LayerNorm(dim, eps=10.0 ** float(torch.empty(()).uniform_(-6, 0)))
    with torch.no_grad():
        norm.weight.copy_(torch.randn(dim) * scale)
        norm.bias.copy_(torch.randn(dim))
    return norm


def pre_norm(scale: float) -> nn.Module:
    attn, mlp = scaled_(DotProductAttention(D, H), scale), scaled_(Mlp(D, 2 * D), scale)
    return PreNormBlock(attn, mlp, norm_with_affine(1.0), norm_with_affine(1.0), drop_path=0.1)


def norm_first(scale: float) -> nn.Module:
    attn, mlp = scaled_(DotProductAttention(D, H), scale), scaled_(SLL(D, 2 * D), scale)
    return NormFirstBlock(attn, mlp, SmoothProject(D, 1.0), LayerProject(D), drop_path=0.1)


def post_norm(scale: float) -> nn.Module:
    attn, mlp = scaled_(DotProductAttention(D, H), scale), scaled_(Mlp(D, 2 * D), scale)
    residual = nn.Identity if scale > 1 else partial(WeightedResidual, D, init=0.5)
    return PostNormBlock(attn, mlp, SmoothProject(D), scaled_(CenterNorm(D), 1.0), drop_path=0.1, residual=residual)


def conv2d(scale: float) -> nn.Module:
    kernel, stride, padding = ((3, 1, 1), (4, 2, 1), (3, 2, 0), (1, 1, 0), (4, 3, 2))[int(torch.randint(5, ()))]
    return scaled_(nn.Conv2d(2, 3, kernel, stride, padding), scale)


def cell_conv2d(scale: float) -> nn.Module:
    kernel, stride, padding = ((3, 1, 1), (4, 2, 1), (4, 2, 0), (1, 1, 0), (2, 2, 0))[int(torch.randint(5, ()))]
    return scaled_(CellConv2d(2, 3, kernel, stride, padding), scale)


def swin_stage(scale: float) -> nn.Module:
    """Return a stage that merges 5 x 5 tokens to 3 x 3, with plain and shifted windows of 2 x 2, all padded."""
    model = create_model(
        "dp_swin_t", img_size=20, window_size=2, embed_dim=D, depths=(1, 2), num_heads=(H, H), norm="smoothproject"
    )
    return scaled_(model.get_submodule("layers.1"), scale)


def normalize(scale: float) -> nn.Module:
    return Normalize(tuple(torch.rand(N).tolist()), tuple((scale * torch.rand(N) + 0.05).tolist()))


# (module, share of the bound that the search must reach for the check to be meaningful)
CASES: dict[type[nn.Module], tuple[Make, float]] = {
    nn.Linear: (lambda s: scaled_(nn.Linear(D, 7), s), 0.98),
    nn.Identity: (lambda s: nn.Identity(), 0.99),
    nn.Dropout: (lambda s: nn.Dropout(0.5), 0.99),
    nn.Flatten: (lambda s: nn.Flatten(), 0.99),
    DropPath: (lambda s: DropPath(0.5), 0.99),
    nn.ReLU: (lambda s: nn.ReLU(), 0.9),
    nn.Tanh: (lambda s: nn.Tanh(), 0.5),
    nn.Sigmoid: (lambda s: nn.Sigmoid(), 0.5),
    nn.SiLU: (lambda s: nn.SiLU(), 0.9),
    nn.Softplus: (lambda s: nn.Softplus(s, threshold=40), 0.9),
    MonotoneGELU: (lambda s: MonotoneGELU(), 0.9),
    nn.GELU: (lambda s: nn.GELU("tanh" if s > 1 else "none"), 0.9),
    nn.Sequential: (lambda s: nn.Sequential(scaled_(nn.Linear(D, D), s), nn.ReLU()), 0.6),
    nn.LayerNorm: (norm_with_affine, 0.8),
    LayerProject: (lambda s: LayerProject(D, s * D**0.5), 0.98),
    SmoothProject: (lambda s: SmoothProject(D, s * D**0.5), 0.95),
    Mlp: (lambda s: scaled_(Mlp(D, 2 * D), s), 0.4),
    SLL: (lambda s: scaled_(SLL(D, 2 * D, nn.Tanh if s > 1 else nn.ReLU), s), 0.9),
    DotProductAttention: (lambda s: scaled_(DotProductAttention(D, H), s), 0.5),
    ConvMixing: (lambda s: scaled_(ConvMixing(D, H, kernels=(1, 3, 5)), s), 0.9),
    L2Attention: (lambda s: scaled_(L2Attention(D, H), s), 0.1),
    ScaledCosineAttention: (lambda s: scaled_(ScaledCosineAttention(D, H, tau=s, eps=s), s), 0.35),
    LipschitzNormAttention: (lambda s: scaled_(LipschitzNormAttention(D, H), s), 0.15),
    GPSA: (lambda s: scaled_(GPSA(DotProductAttention(D, H)), s), 0.9),
    CenterNorm: (lambda s: scaled_(CenterNorm(D), s), 0.98),
    WeightedResidual: (lambda s: scaled_(WeightedResidual(D), s), 0.9),
    ConstrainedMlp: (lambda s: scaled_(ConstrainedMlp(D, 2 * D), s), 0.7),
    nn.Conv2d: (conv2d, 0.9),
    CellConv2d: (cell_conv2d, 0.9),
    CircularConv2d: (lambda s: scaled_(CircularConv2d(2, 3, (3, 5)), s), 0.9),
    ReLUx: (lambda s: scaled_(ReLUx((N, D), 1.0), s), 0.9),
    WindowAttention: (lambda s: scaled_(WindowAttention(DotProductAttention(D, H), (2, 2)), s), 0.9),
    MaskedAttention: (lambda s: scaled_(masked(s, H, N), s), 0.9),
    SwinTransformerBlock: (lambda s: swin_stage(s).get_submodule("blocks.1"), 0.7),
    SwinTransformerStage: (swin_stage, 0.3),
    PatchMerging: (lambda s: swin_stage(s).get_submodule("downsample"), 0.9),
    PreNormBlock: (pre_norm, 0.1),
    PostNormBlock: (post_norm, 0.6),
    NormFirstBlock: (norm_first, 0.3),
    Normalize: (normalize, 0.9),
}
# Inputs that are not (N, D).
SHAPES: dict[type[nn.Module], tuple[int, ...]] = {
    Normalize: (N, 2, 6),
    nn.Conv2d: (2, 6, 7),
    CellConv2d: (2, 6, 7),
    CircularConv2d: (2, 6, 7),
    GPSA: (4, D),
    WindowAttention: (4, D),
    SwinTransformerBlock: (3, 3, 2 * D),
    SwinTransformerStage: (5, 5, D),
    PatchMerging: (5, 5, D),
}


def instances(make: Make, shape: tuple[int, ...], seed: int) -> list[tuple[nn.Module, Tensor, Tensor]]:
    """Return MODULES modules, each with INPUTS inputs of sizes 0.01 to 10 and radii of 1e-3 to 10 times theirs."""
    torch.manual_seed(seed)
    cases = []
    for i in range(MODULES):
        module = make(2.0 ** (i % 5 - 2)).double().eval().requires_grad_(False)
        x = torch.randn(INPUTS, *shape, dtype=torch.float64) * 10 ** torch.empty(INPUTS).uniform_(-2, 1).view(
            -1, *(1,) * len(shape)
        )
        r = x.flatten(1).norm(dim=1) * 10 ** torch.empty(INPUTS).uniform_(-3, 1)
        cases.append((module, x, r.double()))
    return cases


def reached(cases: list[tuple[nn.Module, Tensor, Tensor]], residual: bool = False, local: bool = False) -> Tensor:
    """Return (largest change found) / bound of every instance; above 1 is a counter-example."""
    ratios = []
    for module, x, r in cases:
        with torch.no_grad():
            y, bound = (residual_layer_of if residual else layer_of)(module, local=local)(x)

        def f(z: Tensor, module: nn.Module = module) -> Tensor:
            return z + module(z) if residual else module(z)

        torch.testing.assert_close(y, f(x))
        ratios.append(largest_change(f, x, r) / bound(r))
    return torch.cat(ratios)
