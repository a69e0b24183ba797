"""Pretrained weights for our models: from timm by a full tag, from a local file, or from a URL with its sha256."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from certizoo import UserError
from certizoo.nearest import nearest
from zoo.attention.softmax import SoftmaxAttention
from zoo.models import convert
from zoo.weights import fetch

log = logging.getLogger(__name__)

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
WRAPPERS = ("model", "state_dict")  # keys under which published files keep the state dict
EXAMPLE = "vit_base_patch16_224.augreg2_in21k_ft_in1k"
Statistics = dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Weights:
    """A state dict, and what else its source provides: pixel mean and std, and the heads of every attention.

    The latter are {} and [] if the source does not have them.
    """

    state: Mapping[str, Tensor]
    statistics: Statistics
    num_heads: list[int]


def load_pretrained(model: nn.Module, source: str | Path) -> None:
    """Load the weights of `source` into `model`, and log in one line what was adapted (see `convert.from_timm`).

    The pixel statistics become the source's if it has them: tags and our own exports do; with other files the model
    keeps its own.

    Args:
        model: the model to fill.
        source: a full timm tag ("vit_base_patch16_224.augreg2_in21k_ft_in1k"), fetched over the network; or a file,
            .safetensors or one that torch.load reads without running code (.pth, .pt, .bin); or URL#sha256=HEX of a
            .safetensors, the URL https://... or hf-hub:OWNER/REPOSITORY@REVISION/FILE, kept in the cache.

    Raises:
        UserError: if the weights are not available or do not fit.
    """
    check_source(source)
    if fetch.is_remote(source):
        source = _fetched(str(source))
    weights = _from_file(Path(source)) if _is_file(source) else _from_tag(str(source))
    heads = [module.num_heads for module in model.modules() if isinstance(module, SoftmaxAttention)]
    if weights.num_heads and weights.num_heads != heads:
        raise UserError(
            f"{source} has heads {weights.num_heads}, the model has {heads}; set num_heads, or take another tag"
        )
    try:
        state = convert.from_timm(weights.state, model)
        adapted = convert.adaptations(weights.state, model)
    except UserError as error:
        raise UserError(f"{source} does not fit: {error}") from None
    for name, values in weights.statistics.items():
        key = f"normalize.{name}"
        state[key] = torch.tensor(values).view_as(state[key]).to(state[key])
    model.load_state_dict(state)
    log.log(
        logging.WARNING if adapted else logging.INFO, "%s", "; ".join([f"pretrained weights of {source}", *adapted])
    )


def _is_file(source: str | Path) -> bool:
    return isinstance(source, Path) or source.endswith(SUFFIXES) or Path(source).is_file()


def check_source(source: str | Path) -> None:
    """Raise UserError if such weights cannot exist: not a file of the right kind, not a full tag. Fetches nothing."""
    if fetch.is_remote(source):
        fetch.pinned(str(source))
        return
    if not _is_file(source):
        _check_tag(str(source))
        return
    path = Path(source)
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


def _from_file(path: Path) -> Weights:
    return _safetensors(path) if path.suffix == ".safetensors" else _torch(path)


def _safetensors(path: Path) -> Weights:
    try:
        with safe_open(path, framework="pt") as file:
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not a mapping)
            told = file.metadata() or {}
        statistics = {key: tuple(json.loads(told[key])) for key in ("mean", "std") if key in told}
    except (SafetensorError, ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); copy it again") from None
    return Weights(state, statistics, [])


def _torch(path: Path) -> Weights:
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the reader may raise anything on a damaged or foreign file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path} cannot be read as plain weights ({reason}); save its state dict as .safetensors"
        ) from None
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{path} does not hold a state dict; save one, names with tensors, as .safetensors")
    return Weights(content, {}, [])


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
    return Weights(theirs.state_dict(), {"mean": config["mean"], "std": config["std"]}, heads)


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
