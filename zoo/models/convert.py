"""timm's state dicts in our models and back, and dot-product weights as the start of L2 attention.

    timm                                 ours
    blocks.i.attn.{qkv,proj}             the same                                     ViT, DeiT
    blocks.i.attn.{qk,v,proj}            blocks.i.attn.content.{qkv,proj}             ConViT (qkv: qk over v)
    layers.i.blocks.j.attn.{qkv,proj}    layers.i.blocks.j.attn.content.{qkv,proj}    Swin

All other keys are the same. The pixel statistics are outside of timm's models, but inside ours (`normalize`). A state
dict does not contain heads, activations and the eps of norms: the caller has to name the same architecture.
"""

import math
import re
from collections.abc import Mapping

import torch
from timm.layers import (
    ClassifierHead,
    DropPath,
    PatchEmbed,
    SelectAdaptivePool2d,
    resample_abs_pos_embed,
    resample_patch_embed,
)
from timm.layers.adaptive_avgmax_pool import FastAdaptiveAvgPool
from timm.layers.pos_embed_rel import resize_rel_pos_bias_table
from timm.models.swin_transformer import PatchMerging, SwinTransformerBlock, SwinTransformerStage
from torch import Tensor, nn

from certizoo import UserError
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.gpsa import GPSA
from zoo.attention.l2 import L2Attention
from zoo.attention.softmax.module import SoftmaxAttention
from zoo.attention.window import WindowAttention
from zoo.layers.block import PreNormBlock
from zoo.layers.fold import folded
from zoo.layers.mlp import Mlp
from zoo.layers.patches import ConvStem, Normalize, PatchProjection
from zoo.models.swin import Swin
from zoo.models.vit import ViT

State = dict[str, Tensor]

TABLES = (
    "relative_position_index",
    "attn_mask",
    "rel_indices",
)  # tables of indices in old checkpoints, which models create themselves
HEAD = "head."
# The parts of a timm ViT, ConViT or Swin, by exact type: other types have no counterpart there.
TIMM_PARTS = {
    ViT, PreNormBlock, DotProductAttention, GPSA, Mlp, Normalize, PatchEmbed, PatchProjection,
    Swin, SwinTransformerStage, SwinTransformerBlock, WindowAttention, PatchMerging,
    ClassifierHead, SelectAdaptivePool2d, FastAdaptiveAvgPool,
    nn.Linear, nn.LayerNorm, nn.GELU, nn.Dropout, DropPath, nn.Identity, nn.Sequential,
}  # fmt: skip
BIAS_IS_OPTIONAL = (".qkv", ".reduction")


def from_timm(state: Mapping[str, Tensor], model: nn.Module) -> State:
    """Return the state dict of `model` with the weights of a timm ViT, DeiT, ConViT or Swin of the same sizes.

    With dot-product attention the logits are equal. Weights for another image or patch size, or another window, are
    resampled by timm's functions. For another number of classes the head keeps the model's values. For L2 attention see
    `dp_to_l2`. Buffers keep the model's values. Our own state dicts fit unchanged. Neither argument is changed. Raises
    UserError naming the first key that does not fit.
    """
    ours = model.state_dict()
    weights = _our_names(state, model)
    if distances := _distances(model):
        weights = dp_to_l2(weights, tied=all(attention.k is None for attention in distances))
    if _head_differs(weights, ours):
        weights = {key: value for key, value in weights.items() if not key.startswith(HEAD)}
    weights = {key: _resampled(key, value, model) for key, value in weights.items()}
    for key, value in weights.items():
        _check_place(key, value, ours)
    for key, _ in model.named_parameters():
        if key not in weights and not key.startswith(HEAD):
            raise UserError(f"the weights have no {key}; {_advice(key, 'False')}")
    return {key: weights.get(key, own).to(own) for key, own in ours.items()}


def dp_to_l2(state: Mapping[str, Tensor], tied: bool = True) -> State:
    """Convert dot-product attention's weights (our names) into a start of L2 attention, for further training.

        W_Q -> W_Q = W_K,   W_V, W_O -> W_V, W_O,   b_O -> b_O + W_O b_V,   W_K, b_Q, b_K dropped.

    b_V is added to every token alike because rows of P sum to 1, so moving it after W_O is exact; b_Q cancels in
    distances. Untied attention keeps W_K. Source: CertViT (docs/references.md#certvit), section 4; its code copies W_O
    of the first layer into all, which is not followed here.
    """
    out = dict(state)
    for name in [key.removesuffix(".qkv.weight") for key in state if key.endswith(".qkv.weight")]:
        w_q, w_k, w_v = out.pop(f"{name}.qkv.weight").chunk(3)
        out |= {f"{name}.q.weight": w_q, f"{name}.v.weight": w_v}
        if not tied:
            out[f"{name}.k.weight"] = w_k
        if (bias := out.pop(f"{name}.qkv.bias", None)) is not None:
            shift = state[f"{name}.proj.weight"] @ bias.chunk(3)[2]
            out[f"{name}.proj.bias"] = shift + out[f"{name}.proj.bias"] if f"{name}.proj.bias" in out else shift
    return out


def adaptations(state: Mapping[str, Tensor], model: nn.Module) -> list[str]:
    """Describe what `from_timm` does to these weights in addition to renaming."""
    ours, found = model.state_dict(), []
    weights = _our_names(state, model)
    if _head_differs(weights, ours):
        found.append(
            f"the head keeps its initial values ({_classes(weights) or 'no'} classes there, {_classes(ours)} here)"
        )
    if resampled := [key for key, value in weights.items() if value.shape != _resampled(key, value, model).shape]:
        found.append(f"resampled: {', '.join(resampled[:3])}{', ...' if len(resampled) > 3 else ''}")
    if _distances(model) and dp_to_l2(weights).keys() != weights.keys():
        found.append("dot products became distances, which have to be trained on")
    return found


def _our_names(state: Mapping[str, Tensor], model: nn.Module) -> State:
    wrapped = _wrapped(model)
    named: State = {}
    for key, value in state.items():
        if key.endswith(TABLES):
            continue
        name, _, rest = key.rpartition(".attn.")
        inside = f"{name}.attn" in wrapped and re.match(r"(qkv|qk|v|proj)\.", rest)
        named[f"{name}.attn.content.{rest}" if inside else key] = value.float()
    return _joined(named)


def _wrapped(model: nn.Module) -> set[str]:
    """Return the names of the attentions that wrap another one (`content`)."""
    content = {name for name, module in model.named_modules() if isinstance(module, SoftmaxAttention)}
    return {name.removesuffix(".content") for name in content if name.endswith(".content")}


def _joined(state: State) -> State:
    """Join qk and v into one qkv, qk over v."""
    joined = dict(state)
    for key in state:
        if ".qk." in key and (v := joined.pop(key.replace(".qk.", ".v."), None)) is not None:
            joined[key.replace(".qk.", ".qkv.")] = torch.cat([joined.pop(key), v])
    return joined


def _distances(model: nn.Module) -> list[L2Attention]:
    return [module for module in model.modules() if isinstance(module, L2Attention)]


def _head_differs(weights: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> bool:
    return _classes(weights) != _classes(ours)


def _classes(state: Mapping[str, Tensor]) -> int | None:
    return next((len(value) for key, value in state.items() if key.startswith(HEAD)), None)


def _resampled(key: str, value: Tensor, model: nn.Module) -> Tensor:
    """Resample weights that depend on image, patch or window size to the model's sizes; return others unchanged."""
    own = model.state_dict().get(key)
    if own is None or own.shape == value.shape or own.ndim != value.ndim:
        return value
    if key == "patch_embed.proj.weight":
        return resample_patch_embed(value, list(own.shape[2:]))
    if key == "pos_embed":
        return _positions(value, own.shape[1], model.get_submodule("patch_embed"))
    if key.endswith("relative_position_bias_table"):
        window = (math.isqrt(len(own)) + 1) // 2  # (2 window - 1)^2 offsets
        return resize_rel_pos_bias_table(value, (window, window), tuple(own.shape))
    return value


def _positions(value_1ND: Tensor, tokens: int, patch_embed: nn.Module) -> Tensor:
    """Resample the positions to another square grid of patches; those of other leading tokens are unchanged."""
    assert isinstance(patch_embed, PatchEmbed | ConvStem)
    others = tokens - patch_embed.num_patches
    patches = value_1ND.shape[1] - others
    if patches < 1 or math.isqrt(patches) ** 2 != patches:
        return value_1ND
    return resample_abs_pos_embed(value_1ND, list(patch_embed.grid_size), num_prefix_tokens=others)


def _check_place(key: str, value: Tensor, ours: Mapping[str, Tensor]) -> None:
    """Raise UserError unless the model has such a weight, and of this shape."""
    module, _, leaf = key.rpartition(".")
    if f"{module}.parametrizations.{leaf}.original" in ours:
        raise UserError(f"the model constrains {key}, so it would compute another function; create it without caps")
    if key not in ours:
        raise UserError(f"the weights have {key}, but the model does not; {_advice(key, 'True')}")
    if value.shape != ours[key].shape:
        raise UserError(
            f"{key} is {tuple(value.shape)} in the weights and {tuple(ours[key].shape)} in the model; create the model "
            "with the sizes of the weights (embed_dim, depth, num_heads, mlp_ratio, in_chans)"
        )


def _advice(key: str, bias: str) -> str:
    """Return the advice for a key that only one side has."""
    if key.endswith((".qkv.bias", ".qk.bias", ".v.bias")):
        return f"create the model with qkv_bias={bias}"
    if key.endswith(".bias"):
        return f"create the model with bias={bias}"
    return "take weights of the same architecture and depth, in timm's names"


def to_timm(model: nn.Module) -> State:
    """Return the inverse of `from_timm`: a state dict that timm's architecture loads strictly, parametrisations folded.

    The pixel statistics are not included (`model.normalize`). Models with global_pool 'avg' are timm's with
    class_token=False and the same fc_norm. Raises UserError naming the first part that timm's models do not have.
    """
    plain = folded(model)
    for name, module in plain.named_modules():
        _check_timm_has(name, module)
    wrapped = _wrapped(plain)
    gated = {name for name, module in plain.named_modules() if isinstance(module, GPSA)}
    state: State = {}
    for key, value in plain.named_parameters():
        name, content, rest = key.partition(".content.")
        own = value.detach()
        if name in gated and rest.startswith("qkv."):
            leaf = rest.removeprefix("qkv.")
            state[f"{name}.qk.{leaf}"], state[f"{name}.v.{leaf}"] = own.split([2 * len(own) // 3, len(own) // 3])
        else:
            state[f"{name}.{rest}" if content and name in wrapped else key] = own
    return state


def _head_width(module: DotProductAttention) -> int:
    return module.qkv.in_features // module.num_heads


def _check_timm_has(name: str, module: nn.Module) -> None:
    """Raise UserError if timm's ViT, ConViT and Swin have no such part."""
    missing = None
    if type(module) not in TIMM_PARTS:
        missing = type(module).__name__
    elif isinstance(module, DotProductAttention) and module.scale != _head_width(module) ** -0.5:
        missing = f"attention scale {module.scale:g}"
    elif isinstance(module, nn.Linear | nn.Conv2d) and module.bias is None and not name.endswith(BIAS_IS_OPTIONAL):
        missing = "missing bias"
    if missing:
        raise UserError(f"timm has no architecture with the {missing} of {name or 'this model'}; export as safetensors")
