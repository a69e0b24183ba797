"""The hand-over folder: what training passes on. `model.safetensors` (float32) and `config.yaml`; no pickle."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from certizoo import UserError
from certizoo.files import whole_file, write_whole
from zoo.models.factory import Options, create_model, model_options, pixel_statistics

WEIGHTS, CONFIG = "model.safetensors", "config.yaml"


def save(folder: Path, model: nn.Module, model_config: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Write the weights of `model` and a `config.yaml` with the keys of `extra` and, under `model`, every option of the
    model: a name alone would come back as another function once its defaults change. Each file appears whole or not
    at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: value.detach().float().cpu().contiguous() for key, value in model.state_dict().items()}
    with whole_file(folder / WEIGHTS) as part:
        save_file(state, part)
    options = model_options(**model_config)
    options |= _brought(model, options)
    config = {**extra, "model": {"name": model_config["name"], **options}}
    write_whole(folder / CONFIG, yaml.safe_dump(config, sort_keys=False))


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a hand-over, without its weights. Raises UserError where `folder` is no hand-over."""
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise UserError(f"{folder} is no hand-over: {name} is missing; train with trainers/adv_train.py first")
    config = yaml.safe_load((folder / CONFIG).read_text())
    if not isinstance(config, dict) or "name" not in config.get("model", {}):
        raise UserError(f"{folder / CONFIG} names no model; use the file that training wrote beside the weights")
    return config


def weights_sha256(folder: Path) -> str:
    """Of the file with the weights: what a result belongs to."""
    return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()


def load(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a hand-over in eval mode, and its whole config. Raises UserError where the two do not fit."""
    config = read_config(folder)
    model = create_model(**config["model"])
    configured = {name: value.clone() for name, value in _normalisation(model).items()}
    try:
        model.load_state_dict(load_file(folder / WEIGHTS))
    except SafetensorError as error:
        raise UserError(f"{folder / WEIGHTS} is damaged ({error}); copy or train it again") from None
    except RuntimeError as error:
        reason = " ".join(str(error).split()[:40])
        raise UserError(
            f"{folder / WEIGHTS} is not a checkpoint of {config['model']['name']}: {reason}; "
            "use the config.yaml that was written with these weights"
        ) from None
    if any(not torch.equal(value, configured[name]) for name, value in _normalisation(model).items()):
        raise UserError(
            f"{folder / CONFIG} and {WEIGHTS} normalise images differently; give the config the mean and std that the "
            "weights were trained with"
        )
    return model.eval().requires_grad_(False), config


def _brought(model: nn.Module, options: Options) -> dict[str, list[float]]:
    """mean and std that are not those of the options: pretrained weights bring their own."""
    own = _normalisation(model)
    expected = {name: torch.tensor(values) for name, values in pixel_statistics(options).items()}
    return {name: own[name].tolist() for name in expected if not torch.equal(own[name], expected[name])}


def _normalisation(model: nn.Module) -> dict[str, torch.Tensor]:
    """mean and std (C,) in the model."""
    return {name: model.get_buffer(f"normalize.{name}").float().flatten().cpu() for name in ("mean", "std")}
