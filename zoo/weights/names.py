"""Names of weights as other libraries write them -> timm's, which the zoo shares.

    timm                       torchvision                                Hugging Face
    cls_token, pos_embed       class_token, encoder.pos_embedding         embeddings.{cls_token,position_embeddings}
    patch_embed.proj           conv_proj                                  embeddings.patch_embeddings.projection
    blocks.i.norm1, .norm2     encoder.layers.encoder_layer_i.ln_1, ln_2  encoder.layer.i.layernorm_{before,after}
    blocks.i.attn.qkv          .self_attention.in_proj_                   .attention.attention.{query,key,value}
    blocks.i.attn.proj         .self_attention.out_proj                   .attention.output.dense
    blocks.i.mlp.fc1, .fc2     .mlp.0, .mlp.3                             .intermediate.dense, .output.dense
    norm, head                 encoder.ln, heads.head                     layernorm, classifier

In memory, version 5 of Hugging Face's transformers says layers.i.attention.{q,k,v,o}_proj and mlp.fc1, fc2 instead.
Only ViT has such tables. All other names stay as they are.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from certizoo import UserError

TIMM, TORCHVISION, HUGGING_FACE, ZOO = "timm", "torchvision", "Hugging Face", "certizoo"
# A key that only the state dicts of one library have.
MARKS = {
    TORCHVISION: r"encoder\.layers\.encoder_layer_\d+\.",
    HUGGING_FACE: r"(\w+\.)?embeddings\.patch_embeddings\.",
    ZOO: r"normalize\.(mean|std)$",
}
# Prefixes that wrappers add to keys: DDP and DeepSpeed, torch.compile, a Lightning module's attribute.
WRAPPED = re.compile(r"^(module\.|_orig_mod\.|model\.)+")
COMPILED = "._orig_mod."
RULES: dict[str, tuple[tuple[str, str], ...]] = {
    TORCHVISION: (
        (r"^class_token$", "cls_token"),
        (r"^encoder\.pos_embedding$", "pos_embed"),
        (r"^conv_proj\.", "patch_embed.proj."),
        (r"^encoder\.ln\.", "norm."),
        (r"^heads\.head\.", "head."),
        (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
        (r"\.ln_([12])\.", r".norm\1."),
        (r"\.self_attention\.in_proj_", ".attn.qkv."),
        (r"\.self_attention\.out_proj\.", ".attn.proj."),
        (r"\.mlp\.(0|linear_1)\.", ".mlp.fc1."),
        (r"\.mlp\.(3|linear_2)\.", ".mlp.fc2."),
    ),
    HUGGING_FACE: (
        (r"^\w+\.(?=(embeddings|encoder|layers|layernorm)\.)", ""),
        (r"^embeddings\.cls_token$", "cls_token"),
        (r"^embeddings\.position_embeddings$", "pos_embed"),
        (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
        (r"^layernorm\.", "norm."),
        (r"^classifier\.", "head."),
        (r"^(?:encoder\.layer|layers)\.(\d+)\.", r"blocks.\1."),
        (r"\.layernorm_before\.", ".norm1."),
        (r"\.layernorm_after\.", ".norm2."),
        (r"\.attention\.(?:attention\.query|q_proj)\.", ".attn.q."),
        (r"\.attention\.(?:attention\.key|k_proj)\.", ".attn.k."),
        (r"\.attention\.(?:attention\.value|v_proj)\.", ".attn.v."),
        (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"\.output\.dense\.", ".mlp.fc2."),
    ),
}


def unwrapped(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights without the prefixes of wrappers. Raises UserError if two keys become one."""
    bare: dict[str, Tensor] = {}
    for key, value in state.items():
        name = WRAPPED.sub("", key.replace(COMPILED, "."))
        if name in bare:
            raise UserError(f"it holds {name} twice, once as {key}; save the state dict of one model")
        bare[name] = value
    return bare


def library_of(state: Mapping[str, Tensor]) -> str:
    """Return the library whose names these are, timm where no other claims them."""
    return next((library for library, mark in MARKS.items() if any(re.match(mark, key) for key in state)), TIMM)


def in_timms_names(state: Mapping[str, Tensor], library: str) -> dict[str, Tensor]:
    """Return the weights in timm's names. Hugging Face's W_Q, W_K and W_V are joined."""
    named = {_renamed(key, RULES.get(library, ())): value for key, value in state.items()}
    for key in [key for key in named if library == HUGGING_FACE and ".attn.q." in key]:
        parts = [key.replace(".q.", f".{part}.") for part in "qkv"]
        if all(part in named for part in parts):
            named[key.replace(".q.", ".qkv.")] = torch.cat([named.pop(part) for part in parts])
    return named


def _renamed(key: str, rules: Iterable[tuple[str, str]]) -> str:
    for pattern, name in rules:
        key = re.sub(pattern, name, key)
    return key
