"""Models by name: `create_model`, `list_models`, and the same names in timm's registry.

A name is `<attention variant>_vit_<size>` or one of the models below. Everything is resolved here; the model classes
receive ready-made parts.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

import timm.models
from timm.layers import Mlp
from torch import nn

from certizoo import UserError
from zoo import attention as attention_files
from zoo.block import NormFirstBlock, PreNormBlock
from zoo.mlp import SLL
from zoo.norms import LayerProject, SmoothProject
from zoo.vit import ViT

Options = dict[str, Any]

NORMS: dict[str, Callable[..., nn.Module]] = {
    "layernorm": partial(nn.LayerNorm, eps=1e-6),
    "layerproject": LayerProject,
    "smoothproject": SmoothProject,
}
MLPS: dict[str, Callable[..., nn.Module]] = {
    "gelu": Mlp,
    "sll_relu": SLL,
    "sll_tanh": partial(SLL, act=nn.Tanh),
}
BLOCKS = {"prenorm": PreNormBlock, "normfirst": NormFirstBlock}

IMAGENET_STATISTICS = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
GRAY_STATISTICS = {"mean": (0.5,), "std": (0.5,)}

# timm's defaults: patch 16, 224 pixels, class token, LayerNorm, GELU.
STANDARD: Options = {
    "block": "prenorm",
    "norm": "layernorm",
    "attn_norm": None,
    "mlp": "gelu",
    "mlp_ratio": 4.0,
    "num_classes": 1000,
    "img_size": 224,
    "patch_size": 16,
    "in_chans": 3,
    "global_pool": "cls",
    "drop_path_rate": 0.0,
    "patch_cap": None,
    "mean": None,
    "std": None,
}
SIZES: dict[str, Options] = {
    "ti": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "s": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "b": {"embed_dim": 768, "depth": 12, "num_heads": 12},
}
LIPSCHITZ: Options = {
    "block": "normfirst",
    "global_pool": "avg",
    "patch_cap": 1.0,
    "mlp_ratio": 2.0,
}
# Paper 004: 3 layers, width 128, patch 16, LayerProject, SLL, caps. The paper has R = 1 before the attention; here it
# is R = 2 with smaller caps on W_Q and W_K (README, results).
LOFAST_C10: Options = LIPSCHITZ | {
    "attention": {"name": "dp", "q_cap": 0.3, "k_cap": 0.3, "v_cap": 0.35, "o_cap": 0.35},
    "norm": "layerproject",
    "attn_norm": {"name": "layerproject", "radius": 2.0},
    "mlp": "sll_relu",
    "num_classes": 10,
    "img_size": 32,
    "embed_dim": 128,
    "depth": 3,
    "num_heads": 4,
    "mean": (0.5, 0.5, 0.5),
    "std": (0.25, 0.25, 0.25),
}
# Two heads and small caps on W_Q and W_K: LoFAST adds up the change of P over heads, in proportion to both.
SPEC_DIGITS: Options = {
    "attention": {"name": "dp", "q_cap": 0.3, "k_cap": 0.3, "v_cap": 0.5, "o_cap": 0.5},
    "norm": "smoothproject",
    "attn_norm": {"name": "smoothproject", "radius": 2.0},
    "mlp": "sll_relu",
    "num_classes": 10,
    "img_size": 8,
    "patch_size": 4,
    "in_chans": 1,
    "embed_dim": 48,
    "depth": 2,
    "num_heads": 2,
}


def _models() -> dict[str, Options]:
    """Every name with its options."""
    # SpecFormer is dot-product attention; its penalty belongs to the training (configs/model/spec_*.yaml).
    prefixes = {variant: variant for variant in attention_files.variants()} | {"spec": "dp"}
    models: dict[str, Options] = {
        f"{prefix}_vit_{size}": STANDARD | {"attention": {"name": variant}} | options
        for prefix, variant in prefixes.items()
        for size, options in SIZES.items()
    }
    models["spec_vit_digits"] = STANDARD | LIPSCHITZ | SPEC_DIGITS
    models["lofast_vit_c10"] = STANDARD | LOFAST_C10
    models["lofast_vit_c10_smooth"] = (
        STANDARD
        | LOFAST_C10
        | {"norm": "smoothproject", "attn_norm": {"name": "smoothproject", "radius": 2.0}, "mlp": "sll_tanh"}
    )
    return models


def list_models() -> list[str]:
    """All model names, sorted."""
    return sorted(_models())


def attention_name(name: str, **overrides: Any) -> str:
    """The attention variant of a model: 'dp', ..."""
    attention = model_options(name, **overrides)["attention"]
    return attention if isinstance(attention, str) else str(attention["name"])


def create_model(name: str, **overrides: Any) -> nn.Module:
    """A model by name: images (B, C, H, W) in [0,1] -> logits (B, num_classes).

    Overrides: any option of the model (num_classes, img_size, in_chans, embed_dim, depth, attention, norm, ...).
    `attention`, `norm`, `attn_norm` and `mlp` are a name or a mapping {name: ..., option: value}.
    Raises UserError for an unknown name or option.
    """
    return _vit(model_options(name, **overrides))


def model_options(name: str, **overrides: Any) -> Options:
    """Every option of a model, overrides in place: what has to be kept for the model to be made again as it is, even if
    its defaults change in a later version. Raises UserError as `create_model` does."""
    models = _models()
    if name not in models:
        raise UserError(f"no model {name!r}; {_suggest(name, models)}")
    options = models[name]
    if unknown := sorted(set(overrides) - set(options)):
        raise UserError(f"model {name} has no option {unknown[0]!r}; {_suggest(unknown[0], options)}")
    return options | overrides


def _vit(options: dict[str, Any]) -> ViT:
    attention = _part("attention", options.pop("attention"), attention_files.variants())
    norm = _part("norm", options.pop("norm"), NORMS)
    attn_norm = options.pop("attn_norm")
    norm1 = norm if attn_norm is None else _part("attn_norm", attn_norm, NORMS)
    mlp = _part("mlp", options.pop("mlp"), MLPS)
    block_name, mlp_ratio, num_heads = (options.pop(key) for key in ("block", "mlp_ratio", "num_heads"))
    if block_name not in BLOCKS:
        raise UserError(f"no block {block_name!r}; choose one of {', '.join(BLOCKS)}")

    def block(dim: int, drop_path: float) -> nn.Module:
        return BLOCKS[block_name](
            attn=attention(dim, num_heads),
            mlp=mlp(dim, int(dim * mlp_ratio)),
            norm1=norm1(dim),
            norm2=norm(dim),
            drop_path=drop_path,
        )

    default = IMAGENET_STATISTICS if options["in_chans"] == 3 else GRAY_STATISTICS
    for key in ("mean", "std"):
        options[key] = tuple(options[key] or default[key])
    return ViT(block=block, norm=norm, **options)


def _part(kind: str, choice: str | Options, table: Mapping[str, Callable[..., nn.Module]]) -> Callable[..., nn.Module]:
    """A constructor with its own options already bound."""
    own: dict[str, Any] = {"name": choice} if isinstance(choice, str) else dict(choice)
    name = str(own.pop("name", None))
    if name not in table:
        raise UserError(f"no {kind} {name!r}; {_suggest(name, table)}")
    accepted = inspect.signature(table[name]).parameters
    if unknown := sorted(set(own) - set(accepted)):
        raise UserError(f"{kind} {name} has no option {unknown[0]!r}; {_suggest(unknown[0], accepted)}")
    return partial(table[name], **own)


def _suggest(wrong: str, known: Mapping[str, object]) -> str:
    close = get_close_matches(wrong, known, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(sorted(known))}"


def _register_with_timm() -> None:
    """Make every name a timm entry point of this module, so that `timm.create_model(name)` gives the same model."""
    this = sys.modules[__name__]
    for name in list_models():

        def entry(pretrained: bool = False, _name: str = name, **options: Any) -> nn.Module:
            if pretrained:
                raise UserError(f"{_name} has no published weights; certified checkpoints are in the registry")
            for key in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
                options.pop(key, None)
            return create_model(_name, **options)

        entry.__name__, entry.__qualname__, entry.__module__ = name, name, __name__
        setattr(this, name, entry)
        timm.models.register_model(entry)


_register_with_timm()
