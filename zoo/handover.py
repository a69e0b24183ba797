"""The hand-over folder: what training passes on. `model.safetensors` (float32) and `config.yaml`; no pickle."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from certizoo import UserError
from zoo.factory import create_model, model_options

WEIGHTS, CONFIG = "model.safetensors", "config.yaml"


def save(folder: Path, model: nn.Module, model_config: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Write the weights of `model` and a `config.yaml` with the keys of `extra` and, under `model`, every option of the
    model: a name alone would come back as another function once its defaults change. Each file appears whole or not
    at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: value.detach().float().cpu().contiguous() for key, value in model.state_dict().items()}
    _write(folder / WEIGHTS, lambda path: save_file(state, path))
    config = {**extra, "model": {"name": model_config["name"], **model_options(**model_config)}}
    _write(folder / CONFIG, lambda path: path.write_text(yaml.safe_dump(config, sort_keys=False)))


def load(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a hand-over in eval mode, and its whole config. Raises UserError where the two do not fit."""
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise UserError(f"{folder} is no hand-over: {name} is missing; train with trainers/adv_train.py first")
    config = yaml.safe_load((folder / CONFIG).read_text())
    if not isinstance(config, dict) or "name" not in config.get("model", {}):
        raise UserError(f"{folder / CONFIG} names no model; use the file that training wrote beside the weights")
    model = create_model(**config["model"])
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
    return model.eval().requires_grad_(False), config


def _write(path: Path, write: Any) -> None:
    part = path.with_name(path.name + ".part")
    write(part)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
