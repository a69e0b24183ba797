"""Models by name: `create_model`, `list_models`, and the same names in timm's registry.

`catalog.py` lists the options behind each name; this file builds the models. It resolves all options: the model classes
receive ready-made parts.
"""

import inspect
import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from safetensors.torch import load_file
from torch import nn

from certizoo import UserError
from certizoo.documents import read_yaml
from certizoo.nearest import choices, unknown
from zoo import attention as attention_files
from zoo.attention.gpsa import GPSA
from zoo.layers.block import NormFirstBlock, PostNormBlock, PreNormBlock
from zoo.layers.init import orthogonal_init_, spectral_init_, trunc_normal_init_
from zoo.layers.mlp import SLL, ConstrainedMlp, Mlp
from zoo.layers.monotone import MonotoneGELU
from zoo.layers.norms import CenterNorm, LayerProject, SmoothProject
from zoo.layers.residual import WeightedResidual
from zoo.models import catalog, limits, timm_registry
from zoo.models.catalog import Options
from zoo.models.convnet import ConvNet
from zoo.models.pretrained import load_pretrained
from zoo.models.swin import Swin
from zoo.models.vit import ViT
from zoo.user_models import is_function
from zoo.weights import table

log = logging.getLogger(__name__)

Parts = Mapping[str, Callable[..., Any]]

NORMS: Parts = {
    "layernorm": partial(nn.LayerNorm, eps=1e-6),
    "layerproject": LayerProject,
    "smoothproject": SmoothProject,
    "centernorm": CenterNorm,
}
MLPS: Parts = {
    "gelu": Mlp,
    "silu": partial(Mlp, act_layer=nn.SiLU),
    "softplus": partial(Mlp, act_layer=partial(nn.Softplus, threshold=40.0)),
    "sll_relu": SLL,
    "sll_tanh": partial(SLL, act=nn.Tanh),
    "sll_gelu": partial(SLL, act=MonotoneGELU),
    "aol_relu": partial(ConstrainedMlp, constraint="aol"),
    "aol_tanh": partial(ConstrainedMlp, constraint="aol", act=nn.Tanh),
    "orthogonal_relu": partial(ConstrainedMlp, constraint="orthogonal"),
    "orthogonal_tanh": partial(ConstrainedMlp, constraint="orthogonal", act=nn.Tanh),
    "capped_relu": partial(ConstrainedMlp, constraint="cap"),
    "capped_tanh": partial(ConstrainedMlp, constraint="cap", act=nn.Tanh),
}
BLOCKS: Parts = {"prenorm": PreNormBlock, "normfirst": NormFirstBlock, "postnorm": PostNormBlock}
RESIDUALS: Parts = {"weighted": WeightedResidual}
INITS: dict[str, Callable[[nn.Module], None]] = {
    "trunc_normal": trunc_normal_init_,
    "spectral": spectral_init_,
    "orthogonal": orthogonal_init_,
}

IMAGENET_STATISTICS = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
GRAY_STATISTICS = {"mean": (0.5,), "std": (0.5,)}
RGB = 3  # channels of a model whose options name none
FREE = ("num_classes", "drop_path_rate")  # options that published weights do not fix


def list_models() -> list[str]:
    """Return all model names, sorted."""
    return sorted(catalog.models())


def attention_name(name: str, **overrides: Any) -> str:
    """Return the attention variant of a model: 'dp', ...; 'none' for convolutional nets, 'unknown' for users' own."""
    attention = model_options(name, **overrides).get("attention", "unknown" if is_function(name) else "none")
    return attention if isinstance(attention, str) else str(attention["name"])


def create_model(name: str, *, pretrained: str | bool | None = None, **overrides: Any) -> nn.Module:
    """Create a model by name: images (B, C, H, W) in [0,1] -> logits (B, num_classes).

    Args:
        name: a name of `list_models()`.
        pretrained: True for the published weights of this name (`zoo.weights`); or weights to start from: a full timm
            tag, a file, or URL#sha256=HEX (`zoo.models.pretrained`). It is not an option of the model.
        overrides: any option of the model (num_classes, img_size, in_chans, embed_dim, depth, attention, norm, ...).
            `attention`, `norm`, `attn_norm`, `mlp` and `residual` are a name or a mapping {name: ..., option: value}.

    Raises:
        UserError: for an unknown name or option, and for values that no model can have (`zoo.models.limits`).
    """
    if pretrained is True:
        return published(name, **overrides)
    options = model_options(name, **overrides)
    limits.check(options)
    options |= pixel_statistics(options)
    cfg = timm_registry.describe(name, options)
    model: Any = _choice("backbone", options.pop("backbone"), BACKBONES)(options)
    model.pretrained_cfg = model.default_cfg = cfg
    if pretrained:
        load_pretrained(model, pretrained)
    return model


def published(name: str, **overrides: Any) -> nn.Module:
    """Return the model of a name with its published weights, and the options that it was trained with.

    For another number of classes the head is new. Raises UserError for other options: they would make another function
    under this name.
    """
    folder = table.handover_of(name)
    trained = read_yaml(folder / table.CONFIG)["model"]
    for key, value in overrides.items():
        if key not in FREE and json.dumps(value) != json.dumps(trained.get(key)):  # JSON, so that a tuple equals a list
            raise UserError(f"the published {name} has {key}={trained.get(key)}, not {value}; remove {key}")
    model = create_model(**trained | overrides)
    state = load_file(folder / table.WEIGHTS)
    if overrides.get("num_classes", trained["num_classes"]) != trained["num_classes"]:
        log.warning("the head of %s is new: its weights are of %d classes", name, trained["num_classes"])
        state = {key: value for key, value in state.items() if not key.startswith("head.")}
        state |= {key: value for key, value in model.state_dict().items() if key.startswith("head.")}
    model.load_state_dict(state)
    return model


def model_options(name: str, **overrides: Any) -> Options:
    """Return every option of a model, overrides included.

    Store these to recreate the model, even if its defaults change in a later version. Raises UserError as
    `create_model` does.
    """
    if is_function(name):
        return overrides
    models = catalog.models()
    if name not in models:
        raise unknown("model", name, models, "python -m zoo")
    options = models[name]
    for wrong in sorted(set(overrides) - set(options)):
        raise UserError(
            f"model {name} has no option {wrong!r}; {choices(wrong, options, f'python -m zoo show {name}')}"
        )
    return options | overrides


def input_size(options: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the shape (C, H, W) of the images of a model with these options."""
    return options.get("in_chans", RGB), options["img_size"], options["img_size"]


def pixel_statistics(options: Options) -> dict[str, tuple[float, ...]]:
    """Return mean and std of the pixels that a model with these options normalises by."""
    default = IMAGENET_STATISTICS if options["in_chans"] == RGB else GRAY_STATISTICS
    return {key: tuple(options[key] or default[key]) for key in ("mean", "std")}


def _vit(options: Options) -> nn.Module:
    """Build ViT, DeiT, ConViT, and the Lipschitz ViTs of CertViT and LoFAST."""
    attention = _attention(options)
    norm = _part("norm", options.pop("norm"), NORMS)
    attn_norm = options.pop("attn_norm")
    norm1 = norm if attn_norm is None else _part("attn_norm", attn_norm, NORMS)
    mlp = _part("mlp", options.pop("mlp"), MLPS, bias=options["bias"])
    residual = options.pop("residual")
    own = (
        {} if residual is None else {"residual": partial(_part("residual", residual, RESIDUALS), options["embed_dim"])}
    )
    kind = _part("block", options.pop("block"), BLOCKS, **own)
    dim, mlp_ratio = options["embed_dim"], options.pop("mlp_ratio")
    gpsa_layers = options.pop("gpsa_layers")
    positions = {key: options.pop(key) for key in ("locality_strength", "gating_init")}

    def block(index: int, drop_path: float) -> nn.Module:
        attn = attention()
        if index < gpsa_layers:
            attn = GPSA(attn, **positions)
        return kind(
            attn=attn, mlp=mlp(dim, int(dim * mlp_ratio)), norm1=norm1(dim), norm2=norm(dim), drop_path=drop_path
        )

    init = _choice("init", options.pop("init"), INITS)
    return ViT(block=block, norm=norm, init=init, cls_after=gpsa_layers, **options)


def _text(options: Options) -> nn.Module:
    """Build a ViT of embedded sentences. Raises UserError for parts that cannot skip padding in training."""
    if options["block"] != "normfirst" or options["global_pool"] != "avg":
        raise UserError(
            f"block={options['block']} global_pool={options['global_pool']}: text models have block=normfirst and "
            "global_pool=avg"
        )
    return _vit(options | {"patch_size": 1, "gpsa_layers": 0, "locality_strength": 1.0, "gating_init": 1.0})


def _swin(options: Options) -> nn.Module:
    """Build Swin. Its stages differ in width and heads, so the parts receive both there."""
    variants, qkv_bias = attention_files.variants(), options.pop("qkv_bias")
    return Swin(
        attention=_part("attention", options.pop("attention"), variants, qkv_bias=qkv_bias),
        mlp=_part("mlp", options.pop("mlp"), MLPS),
        norm=_part("norm", options.pop("norm"), NORMS),
        init=_choice("init", options.pop("init"), INITS),
        **options,
    )


def _convnet(options: Options) -> nn.Module:
    """Build the conv nets of CertViT."""
    return ConvNet(init=_choice("init", options.pop("init"), INITS), **options)


BACKBONES: dict[str, Callable[[Options], nn.Module]] = {"convnet": _convnet, "vit": _vit, "text": _text, "swin": _swin}


def _attention(options: Options) -> Callable[[], nn.Module]:
    """Return a constructor of the attention of one layer, with the model's width and biases."""
    kind = _part(
        "attention",
        options.pop("attention"),
        attention_files.variants(),
        qkv_bias=options.pop("qkv_bias"),
        proj_bias=options["bias"],
    )
    return partial(kind, options["embed_dim"], options.pop("num_heads"))


def _part(kind: str, choice: str | Options, table: Parts, **common: Any) -> Callable[..., nn.Module]:
    """Return a constructor with its own options bound, and those of the model that it accepts."""
    own: dict[str, Any] = {"name": choice} if isinstance(choice, str) else dict(choice)
    name = str(own.pop("name", None))
    make = _choice(kind, name, table)
    accepted = _accepted(make)
    for wrong in sorted(set(own) - accepted):
        raise UserError(f"{kind} {name} has no option {wrong!r}; {choices(wrong, sorted(accepted))}")
    return partial(make, **{key: value for key, value in common.items() if key in accepted} | own)


def _choice(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    if name not in table:
        raise unknown(kind, name, table)
    return table[name]


def _accepted(make: Callable[..., Any]) -> set[str]:
    """Return the option names of a constructor, including those it passes on to its base class (**options)."""
    target = make.func if isinstance(make, partial) else make
    names: set[str] = set()
    for base in target.__mro__ if isinstance(target, type) else (target,):
        parameters = inspect.signature(base).parameters.values()
        names |= {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return names


timm_registry.register(catalog.models(), create_model)
