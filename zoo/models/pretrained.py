"""Pretrained weights for our models: from timm by a full tag, from a local file, or from a URL with its sha256."""

import logging
from pathlib import Path

import timm
import torch
from torch import nn

from certizoo import UserError
from certizoo.nearest import nearest
from zoo.attention.softmax.module import SoftmaxAttention
from zoo.models import convert
from zoo.weights import fetch, files
from zoo.weights.files import SUFFIXES, Weights
from zoo.weights.told import Told

log = logging.getLogger(__name__)

EXAMPLE = "vit_base_patch16_224.augreg2_in21k_ft_in1k"


def load_pretrained(model: nn.Module, source: str | Path) -> None:
    """Load the weights of `source` into `model`, and log in one line what was adapted (see `convert.from_timm`).

    The pixel statistics become the source's if it has them: tags and our own exports do; with other files the model
    keeps its own.

    Args:
        model: the model to fill.
        source: a full timm tag ("vit_base_patch16_224.augreg2_in21k_ft_in1k"), fetched over the network; or a file,
            .safetensors, .npz or one that torch.load reads without running code; or URL#sha256=HEX of a
            .safetensors, the URL https://... or hf-hub:OWNER/REPOSITORY@REVISION/FILE, kept in the cache.

    Raises:
        UserError: if the weights are not available or do not fit.
    """
    adapted = fit(model, read(source), source)
    log.log(
        logging.WARNING if adapted else logging.INFO, "%s", "; ".join([f"pretrained weights of {source}", *adapted])
    )


def read(source: str | Path, ema: bool = False) -> Weights:
    """Return the weights of a source (see `load_pretrained`); `ema`: a file's averaged ones."""
    check_source(source)
    if fetch.is_remote(source):
        source = _fetched(str(source))
    if _is_file(source):
        return files.read(Path(source), ema)
    if ema:
        raise UserError(f"{source} is a timm tag, which has one set of weights; leave --ema out")
    return _from_tag(str(source))


def fit(model: nn.Module, weights: Weights, source: str | Path) -> list[str]:
    """Load the weights into `model`, and return what was adapted. Raises UserError if they do not fit."""
    _check_told(model, weights.told, source)
    try:
        state = convert.from_timm(weights.state, model)
        adapted = convert.adaptations(weights.state, model)
    except UserError as error:
        raise UserError(f"{source} does not fit: {error}") from None
    for name, values in weights.told.statistics.items():
        key = f"normalize.{name}"
        if len(values) != state[key].numel():
            raise UserError(
                f"{source} has the {name} of {len(values)} channels, the model {state[key].numel()}; set in_chans"
            )
        state[key] = torch.tensor(values).view_as(state[key]).to(state[key])
    model.load_state_dict(state)
    return adapted


def _check_told(model: nn.Module, told: Told, source: str | Path) -> None:
    """Raise UserError unless heads and eps, which no state dict shows, are those of the source."""
    heads = [module.num_heads for module in model.modules() if isinstance(module, SoftmaxAttention)]
    if told.num_heads and told.num_heads != heads:
        raise UserError(
            f"{source} has heads {told.num_heads}, the model has {heads}; set num_heads, or take another tag"
        )
    eps = {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)}
    if told.eps is not None and eps - {told.eps}:
        raise UserError(
            f"{source} has norms with eps {told.eps:.1e}, the model has {max(eps):.1e}; set "
            f"norm={{name: layernorm, eps: {told.eps:.1e}}}"
        )


def _is_file(source: str | Path) -> bool:
    return isinstance(source, Path) or source.endswith(SUFFIXES) or Path(source).exists()


def check_source(source: str | Path) -> None:
    """Raise UserError if such weights cannot exist: not a file of the right kind, not a full tag. Fetches nothing."""
    if fetch.is_remote(source):
        fetch.pinned(str(source))
        return
    if not _is_file(source):
        _check_tag(str(source))
        return
    path = Path(source)
    if path.is_dir():
        inside = sorted(file.name for file in path.iterdir() if file.suffix in SUFFIXES)
        raise UserError(
            f"{path} is a folder; give a file of weights" + (f" in it: {', '.join(inside[:5])}" * bool(inside))
        )
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a file of weights, or a full timm tag such as {EXAMPLE}")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path} is not a file of weights; give one that ends in {', '.join(SUFFIXES)}")


def _fetched(place: str) -> Path:
    url, digest = fetch.pinned(place)
    path = fetch.cache_folder() / f"{digest}.safetensors"
    return fetch.fetched(
        url, digest, path, fetch.LARGE, "connect to the network, or give a local file of these weights"
    )


def _from_tag(tag: str) -> Weights:
    try:
        theirs = timm.create_model(tag, pretrained=True)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{tag} could not be fetched ({reason}); connect to the network, or give a local file of these weights"
        ) from None
    config = theirs.pretrained_cfg
    heads = [
        module.num_heads for module in theirs.modules() if hasattr(module, "num_heads") and hasattr(module, "proj")
    ]
    told = Told({"mean": config["mean"], "std": config["std"]}, heads, architecture=tag.partition(".")[0])
    return Weights(theirs.state_dict(), told)


def _check_tag(tag: str) -> None:
    """Raise UserError unless this is a full tag, architecture.weights: a bare architecture may change its weights."""
    tags = timm.list_pretrained()
    if tag in tags and "." in tag:
        return
    architecture = tag.partition(".")[0]
    near = [known for known in tags if known.startswith(f"{architecture}.")]
    near = near or nearest(tag, tags)
    what = f"timm has no weights {tag!r}" if "." in tag else f"{tag!r} names an architecture without its weights"
    raise UserError(f"{what}; give a full tag such as {', '.join(near[:4])}, or a file ({', '.join(SUFFIXES)})")
