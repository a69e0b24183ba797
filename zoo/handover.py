"""The hand-over folder, the result of training: `model.safetensors` (float32) and `config.yaml`; no pickle.

That of a text model also holds its `tokenizer.json`.

It may be untrusted. It runs no code but that which the command line of this process named (`zoo.user_models`). The
config is bounded, names no weights other than those in the same folder, and gets no more memory than these fill: its
model is first built on the meta device and compared with the header of the file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from certizoo import UserError
from certizoo.documents import read_yaml, yaml_of
from certizoo.files import sha256, whole_file, write_whole
from zoo.models.factory import Options, create_model, model_options, pixel_statistics
from zoo.user_models import from_function, is_function, trust
from zoo.weights.table import CONFIG, WEIGHTS

MAX_BUFFERS = 2**32  # bytes of masks and indices, which follow from the options and are not weights
RUN_FOLDER = "handover"  # of a run, runs/NAME
TOKENIZER = "tokenizer.json"  # of a text model: the words that its embeddings stand for
Shapes = dict[str, tuple[int, ...]]


def save(folder: Path, model: nn.Module, model_config: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Write the weights of `model` and a `config.yaml`. Each file appears whole or not at all.

    The config has the keys of `extra` and, under `model`, every option of the model: a name alone would give another
    function once its defaults change.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: value.detach().float().cpu().contiguous().clone() for key, value in model.state_dict().items()}
    with whole_file(folder / WEIGHTS) as part:
        save_file(state, part)
    options = model_options(**model_config)
    if not is_function(model_config["name"]):
        options |= _brought(model, options)
    config = {**extra, "model": {"name": model_config["name"], **options}}
    write_whole(folder / CONFIG, yaml_of(config))


def folder_of(named: Path) -> Path:
    """Return the hand-over that a path names: the folder itself, or `handover` in the folder of a run."""
    own = named / RUN_FOLDER
    return own if own.is_dir() and not (named / WEIGHTS).exists() else named


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config of a hand-over, without its weights. Raises UserError if `folder` is not a hand-over."""
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise UserError(f"{folder} is not a hand-over: {name} is missing; train with trainers/adv_train.py first")
    config = read_yaml(folder / CONFIG)
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict) or not all(isinstance(word, str) for word in (*model, model.get("name"))):
        raise UserError(f"{folder / CONFIG} names no model; use the file that training wrote with the weights")
    if "pretrained" in model:
        raise UserError(f"{folder / CONFIG} names other weights than those in its folder; remove model.pretrained")
    return config


def weights_sha256(folder: Path) -> str:
    """Return the digest of the file with the weights, to which a result belongs."""
    return sha256(folder / WEIGHTS)


def load(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model of a hand-over in eval mode, and its whole config. Raises UserError if the two do not fit."""
    config = read_config(folder)
    if is_function(config["model"]["name"]):
        return _of_function(folder, config["model"]["name"]), config
    _hold_together(folder, config["model"])
    model = create_model(**config["model"])
    configured = {name: value.clone() for name, value in _normalisation(model).items()}
    model.load_state_dict(load_file(folder / WEIGHTS))
    if any(not torch.equal(value, configured[name]) for name, value in _normalisation(model).items()):
        raise UserError(
            f"{folder / CONFIG} and {WEIGHTS} normalise images differently; give the config the mean and std that the "
            "weights were trained with"
        )
    return model.eval().requires_grad_(False), config


def save_function(folder: Path, name: str, shape_CHW: tuple[int, int, int], extra: Mapping[str, Any]) -> None:
    """Write the hand-over of a model that the user's MODULE:FUNCTION makes; only this process and its workers load it.

    Raises:
        UserError: it cannot be made, or does not map images of this shape to logits.
    """
    trust(name)
    model = from_function(name).eval()
    channels, size, _ = shape_CHW
    try:
        with torch.no_grad():
            logits = model(torch.full((2, *shape_CHW), 0.5))
    except RuntimeError as error:
        raise UserError(f"{name} does not take images of {channels}x{size}x{size} ({str(error)[:200]})") from None
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2 or len(logits) != 2:
        raise UserError(f"{name} must map images (B, {channels}, {size}, {size}) to logits (B, classes)")
    sizes = {"num_classes": logits.shape[1], "img_size": size, "in_chans": channels}
    parameters = sum(weights.numel() for weights in model.parameters())
    save(folder, model, {"name": name, **sizes, "parameters": parameters}, extra)


def _of_function(folder: Path, name: str) -> nn.Module:
    """Return the model of MODULE:FUNCTION with the weights in `folder`."""
    model = from_function(name)
    try:
        model.load_state_dict(load_file(folder / WEIGHTS))
    except RuntimeError as error:
        raise UserError(f"{name} makes another model each time ({str(error)[:200]}); fix its sizes") from None
    return model.eval().requires_grad_(False)


def _hold_together(folder: Path, options: Options) -> None:
    """Raise UserError unless the weights are exactly those of the model. Neither is in memory yet."""
    held, wanted = _held(folder), _wanted(folder, options)
    wrong = sorted(key for key in {*held, *wanted} if held.get(key) != wanted.get(key))
    if wrong:
        there, asked = (str(shapes.get(wrong[0], "absent")) for shapes in (held, wanted))
        raise UserError(
            f"{folder / WEIGHTS} is not a checkpoint of {options['name']}: {wrong[0][:80]} is {there} there, {asked} "
            f"in the model, {len(wrong)} differ; use the {CONFIG} that was written with these weights"
        )


def _held(folder: Path) -> Shapes:
    """Return the shapes in the header of the file."""
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  (not a mapping)
            kinds = {part.get_dtype() for part in slices.values()}
            shapes = {key: tuple(part.get_shape()) for key, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder / WEIGHTS} is damaged ({str(error)[:200]}); copy or train it again") from None
    if kinds - {"F32"}:
        raise UserError(f"{folder / WEIGHTS} holds {sorted(kinds - {'F32'})[0]}; hand over float32 weights only")
    return shapes


def _wanted(folder: Path, options: Options) -> Shapes:
    """Return the shapes of the model, built without memory for its tensors."""
    try:
        with torch.device("meta"):
            model = create_model(**options)
    except UserError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from None
    except Exception as error:  # contradicting options may make the parts raise anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{folder / CONFIG}: there is no such model ({type(error).__name__}: {reason}); use the file that training "
            "wrote with the weights"
        ) from None
    if sum(buffer.nbytes for buffer in model.buffers()) > MAX_BUFFERS:
        raise UserError(f"{folder / CONFIG}: masks and indices beyond {MAX_BUFFERS >> 30} GiB; use a smaller img_size")
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def _brought(model: nn.Module, options: Options) -> dict[str, list[float]]:
    """Return mean and std if they differ from those of the options: pretrained weights bring their own."""
    own = _normalisation(model)
    expected = {name: torch.tensor(values) for name, values in pixel_statistics(options).items()}
    return {name: own[name].tolist() for name in expected if not torch.equal(own[name], expected[name])}


def _normalisation(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return mean and std (C,) of the model."""
    return {name: model.get_buffer(f"normalize.{name}").float().flatten().cpu() for name in ("mean", "std")}
