"""Models of other libraries with weights loaded under the file's own names: the reference for imported models."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from timm.models.convit import ConVit
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from certizoo import UserError
from zoo.models import convert
from zoo.models.factory import Options, list_models
from zoo.weights import names
from zoo.weights.files import Weights
from zoo.weights.table import WEIGHTS

IMAGES = 2
META = {"format": "pt"}
TOLERANCE = 1e-9  # in float64, relative to 1 + the largest logit
Original = tuple[str, nn.Module]


class NoOriginalError(Exception):
    """The reason why logits cannot be compared."""


def original(weights: Weights, model: nn.Module, options: Options) -> Original:
    """Return the library's model with its own weights, and its name. Raises NoOriginalError."""
    if weights.library not in LIBRARIES:
        raise NoOriginalError(f"the file has {weights.library}'s own names")
    try:
        convert.to_timm(model)
    except UserError:
        raise NoOriginalError(f"no other library has the architecture of {options['name']}") from None
    return LIBRARIES[weights.library](weights, options)


@torch.no_grad()
def largest_difference(model: nn.Module, other: nn.Module, image: tuple[int, int, int]) -> float:
    """Return the largest difference of the logits in float64, on random images, relative to 1 + the largest logit.

    `model` takes images in [0,1], `other` normalised ones. `model` gets its float32 weights back, which are the same.
    Raises NoOriginalError if the logits do not depend on the image.
    """
    images_BCHW = torch.rand(IMAGES, *image, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    try:
        normalised_BCHW = model.double().get_submodule("normalize")(images_BCHW)
        ours, theirs = model(images_BCHW), _logits(other.double().eval()(normalised_BCHW))
    finally:
        model.float()
    if torch.equal(theirs[0], theirs[1]):
        raise NoOriginalError("they are equal for every image, as in a model with an untrained head")
    return float((ours - theirs).abs().max() / (1 + theirs.abs().max()))


def _logits(output: Any) -> Tensor:
    """Return the logits themselves; Hugging Face's models return them as an attribute."""
    logits: Tensor = getattr(output, "logits", output)
    return logits


def _timm(weights: Weights, options: Options) -> Original:
    """Build the architecture that the file names, which knows heads and eps, else the class with the model's sizes."""
    state = {key: value for key, value in weights.state.items() if not key.endswith(convert.TABLES)}
    name = weights.told.architecture
    if name and timm.is_model(name) and name not in list_models():
        sizes = {key: options[key] for key in ("img_size", "num_classes", "in_chans")}
        try:
            return f"timm's {name}", _filled(partial(timm.create_model, name, **sizes), state)
        except (RuntimeError, TypeError):  # trained with other sizes than those of its name
            pass
    make = _swin if options["backbone"] == "swin" else _convit if options["gpsa_layers"] else _vit
    common = {key: options[key] for key in ("img_size", "patch_size", "in_chans", "num_classes", "num_heads")}
    common |= {key: options[key] for key in ("mlp_ratio", "qkv_bias")} | {"norm_layer": _norm(options)}
    made = _filled(lambda: make(options, common), state)
    return f"timm's {type(made).__name__}", made


def _vit(options: Options, common: Mapping[str, Any]) -> nn.Module:
    pool = "token" if options["global_pool"] == "cls" else "avg"
    own = {key: options[key] for key in ("embed_dim", "depth", "fc_norm")}
    return VisionTransformer(**common, **own, global_pool=pool, class_token=pool == "token")


def _convit(options: Options, common: Mapping[str, Any]) -> nn.Module:
    """Timm's class multiplies its width by the heads."""
    width = options["embed_dim"] // options["num_heads"]
    return ConVit(**common, embed_dim=width, depth=options["depth"], local_up_to_layer=options["gpsa_layers"])


def _swin(options: Options, common: Mapping[str, Any]) -> nn.Module:
    return SwinTransformer(**common, **{key: options[key] for key in ("embed_dim", "depths", "window_size")})


def _torchvision(weights: Weights, options: Options) -> Original:
    from torchvision.models import VisionTransformer as TorchvisionViT

    make = partial(
        TorchvisionViT,
        image_size=options["img_size"],
        patch_size=options["patch_size"],
        num_layers=options["depth"],
        num_heads=options["num_heads"],
        hidden_dim=options["embed_dim"],
        mlp_dim=int(options["embed_dim"] * options["mlp_ratio"]),
        num_classes=options["num_classes"],
        norm_layer=_norm(options),
    )
    return "torchvision's VisionTransformer", _filled(make, weights.original)


def _hugging_face(weights: Weights, options: Options) -> Original:
    if importlib.util.find_spec("transformers") is None:
        raise NoOriginalError("transformers is not installed")
    library: Any = importlib.import_module("transformers")
    config = library.ViTConfig(
        hidden_size=options["embed_dim"],
        num_hidden_layers=options["depth"],
        num_attention_heads=options["num_heads"],
        intermediate_size=int(options["embed_dim"] * options["mlp_ratio"]),
        image_size=options["img_size"],
        patch_size=options["patch_size"],
        num_channels=options["in_chans"],
        qkv_bias=options["qkv_bias"],
        num_labels=options["num_classes"],
        layer_norm_eps=_norm(options).keywords["eps"],
    )
    with TemporaryDirectory() as folder:  # its loader alone knows the names of all its versions
        config.save_pretrained(folder)
        save_file({key: value.contiguous() for key, value in weights.original.items()}, Path(folder, WEIGHTS), META)
        made, said = library.ViTForImageClassification.from_pretrained(folder, output_loading_info=True)
    if said["missing_keys"]:
        raise NoOriginalError(f"transformers {library.__version__} does not know these names")
    return "Hugging Face's ViTForImageClassification", made


LIBRARIES: dict[str, Callable[[Weights, Options], Original]] = {
    names.TIMM: _timm,
    names.TORCHVISION: _torchvision,
    names.HUGGING_FACE: _hugging_face,
}


def _filled(make: Callable[[], nn.Module], state: Mapping[str, Tensor]) -> nn.Module:
    """Return the model with exactly these weights. Raises RuntimeError if it has others."""
    made = make()
    made.load_state_dict(state)
    return made


def _norm(options: Options) -> partial[nn.LayerNorm]:
    norm = options["norm"]
    return partial(nn.LayerNorm, eps=1e-6 if isinstance(norm, str) else norm.get("eps", 1e-6))
