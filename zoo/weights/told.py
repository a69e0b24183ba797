"""Facts that a source states beside its weights and a state dict lacks: pixel statistics, heads and eps."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm

from certizoo import UserError
from certizoo.documents import read_json

Statistics = dict[str, tuple[float, ...]]
TIMMS = {"arch", "args", "version", "epoch"}  # the keys by which timm's own checkpoints are known


@dataclass(frozen=True)
class Told:
    """Pixel mean and std, the heads of every attention, eps of the norms, timm's name: each empty if not told."""

    statistics: Statistics = field(default_factory=dict)
    num_heads: list[int] = field(default_factory=list)
    eps: float | None = None
    architecture: str | None = None


def by_timm(content: Any) -> Told:
    """Read the arguments of timm's train.py, in the checkpoints that its saver writes.

    It normalises by its arguments, else by the statistics of the architecture.
    """
    if not isinstance(content, Mapping) or not set(content) >= TIMMS or not isinstance(content["args"], Namespace):
        return Told()
    arguments = vars(content["args"])
    name = arguments.get("model")
    if not isinstance(name, str) or not timm.is_model(name):
        return Told()
    config = timm.get_pretrained_cfg(name)
    said = {key: arguments.get(key) or getattr(config, key, None) for key in ("mean", "std")}
    return Told(statistics=_statistics(said), architecture=name)


def by_hugging_face(folder: Path, depth: int) -> Told:
    """Read config.json and preprocessor_config.json beside the weights, where they exist."""
    model, pixels = (_json(folder / name) for name in ("config.json", "preprocessor_config.json"))
    heads, eps = model.get("num_attention_heads"), model.get("layer_norm_eps")
    return Told(
        statistics=_statistics({"mean": pixels.get("image_mean"), "std": pixels.get("image_std")}),
        num_heads=[heads] * depth if isinstance(heads, int) else [],
        eps=float(eps) if isinstance(eps, float) else None,
    )


def _statistics(said: Mapping[str, Any]) -> Statistics:
    """Return mean and std if both are told."""
    if any(value is None for value in said.values()):
        return {}
    try:
        return {key: tuple(float(number) for number in value) for key, value in said.items()}
    except (TypeError, ValueError):
        raise UserError(f"its pixel statistics are not numbers ({str(said)[:200]}); remove them there") from None


def _json(path: Path) -> Mapping[str, Any]:
    content = read_json(path) if path.is_file() else {}
    return content if isinstance(content, Mapping) else {}
