"""Weights of other programs as a hand-over. The model computes their function, or nothing is written."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from certizoo import UserError
from certizoo.files import disk_errors, sha256
from zoo import handover
from zoo.models.factory import Options, create_model, input_size, model_options
from zoo.models.pretrained import fit, read
from zoo.originals import IMAGES, TOLERANCE, NoOriginalError, largest_difference, original
from zoo.weights.files import EMA, Weights


def import_checkpoint(source: str, name: str, folder: Path, overrides: Mapping[str, Any], ema: bool = False) -> str:
    """Write the model of this name with the weights of `source` as a hand-over, and describe it in one line.

    Logits are compared with those of the library that wrote the weights, where it can run.

    Args:
        source: a file, a timm tag or URL#sha256=HEX (`zoo.models.pretrained.load_pretrained`).
        name: a model of the zoo.
        folder: the hand-over; it must not exist yet.
        overrides: options of the model. Its mean and std replace the source's.
        ema: take the averaged weights of a training checkpoint.

    Raises:
        UserError: if the weights are not sound, do not fit exactly, or the logits differ.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; give another folder: --out DIR")
    options = {"name": name, **model_options(name, **overrides)}
    model = create_model(name, **overrides).eval()
    weights = read(source, ema)
    pixels = "the file's" if weights.told.statistics else "the model's defaults, the file has none: --set mean= std="
    if {"mean", "std"} & set(overrides):
        weights, pixels = replace(weights, told=replace(weights.told, statistics={})), "--set"
    if adapted := fit(model, weights, source):
        raise UserError(
            f"{source} would not keep its function: {'; '.join(adapted)}. Set the sizes of the weights (--set "
            f"num_classes=N img_size=N ...), or train from them: pretrained={source}"
        )
    compared = _compared(model, weights, options, source)
    with disk_errors("make room, or give another folder: --out DIR"):
        handover.save(folder, model, {"name": name, **overrides}, {"pretrained": _origin(source)})
    averaged = "averaged weights" if ema else f"weights (--ema: those of {EMA[0]})" if weights.ema else "weights"
    return f"{folder}: {name} with the {averaged} of {source}; {compared}; mean and std: {pixels}"


def _compared(model: nn.Module, weights: Weights, options: Options, source: str) -> str:
    """Compare the logits with the original's, and describe the result. Raises UserError if they differ."""
    try:
        other, theirs = original(weights, model, options)
        found = largest_difference(model, theirs, input_size(options))
    except NoOriginalError as reason:
        return f"logits not compared: {reason}"
    if not found <= TOLERANCE:
        raise UserError(
            f"{source} computes another function: the logits differ from those of {other} by {found:.1e}; set heads "
            "and norm of the model as they were trained (--set num_heads=N norm={name: layernorm, eps: E})"
        )
    return f"logits equal those of {other} up to {found:.0e} ({IMAGES} random images, float64)"


def _origin(source: str) -> str:
    path = Path(source)
    return f"{path.name}#sha256={sha256(path)}" if path.is_file() else source
