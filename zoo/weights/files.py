"""Weights in files of other programs, read without running any of their code: safetensors, torch's files, npz.

torch's restricted reader (`weights_only=True`) gets a short list of harmless classes beyond its own. Everything else is
refused by name, with the way to convert it.
"""

import json
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from certizoo import UserError
from zoo.weights import names, told
from zoo.weights.told import Told

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".npz")
WRAPPERS = ("model", "state_dict", "module")  # keys under which published files keep the state dict
EMA = ("state_dict_ema", "model_ema")
LFS = b"version https://git-lfs"
CONVERT = "where it was written, run safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')"
INDICES = ("relative_position_index", "num_batches_tracked")  # integers that are not weights


class Unread:
    """The placeholder of an object that is not needed: it is built from anything and keeps nothing."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


# Objects in which programs keep their arguments and measurements. Only a Namespace is built; it keeps attributes.
HARMLESS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    Namespace,
    *((Unread, f"pathlib.{name}") for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
    *((Unread, name) for name in ("numpy.dtype", "numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")),
]


@dataclass(frozen=True)
class Weights:
    """A state dict in timm's names, and what else its source states.

    `original` has the names of `library`, which wrote it, and `ema` says whether the source also has averaged weights.
    """

    state: Mapping[str, Tensor]
    told: Told = field(default_factory=Told)
    library: str = names.TIMM
    original: Mapping[str, Tensor] = field(default_factory=dict)
    ema: bool = False


def read(path: Path, ema: bool = False) -> Weights:
    """Return the weights in a file, or its averaged ones (`ema`). Raises UserError if it holds no sound weights."""
    _require_content(path)
    content, said = READERS.get(path.suffix, _torch)(path)
    has_ema = isinstance(content, Mapping) and any(isinstance(content.get(key), Mapping) for key in EMA)
    try:
        original = names.unwrapped(_state_dict(content, ema))
        _require_sound(original)
        library = names.library_of(original)
        state = names.in_timms_names(original, library)
        if library == names.HUGGING_FACE:
            said = told.by_hugging_face(path.parent, sum(key.endswith(".attn.qkv.weight") for key in state))
        elif library == names.TIMM and not said.statistics:
            said = told.by_timm(content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return Weights(state, said, library, original, has_ema)


def _require_content(path: Path) -> None:
    """Raise UserError for a file that was never fetched."""
    try:
        with path.open("rb") as file:
            first = file.read(len(LFS))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check its path and permissions") from None
    if not first:
        raise UserError(f"{path} is empty (0 bytes); copy or download it again")
    if first == LFS:
        raise UserError(
            f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in the folder of its repository"
        )


def _safetensors(path: Path) -> tuple[Any, Told]:
    try:
        with safe_open(path, framework="pt") as file:
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not a mapping)
            metadata = file.metadata() or {}
        statistics = {key: tuple(json.loads(metadata[key])) for key in ("mean", "std") if key in metadata}
    except (SafetensorError, ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged or cut off ({error}); copy it again") from None
    return state, Told(statistics)


def _npz(path: Path) -> tuple[Any, Told]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        state = {key: torch.from_numpy(np.asarray(array)) for key, array in arrays.items()}
    except (BadZipFile, EOFError, OSError, KeyError, AttributeError):
        raise UserError(f"{path} is damaged or cut off, or is not an npz file; copy it again") from None
    except (ValueError, TypeError):
        raise UserError(f"{path} holds more than arrays of numbers; save those alone with numpy.savez") from None
    if any(key.startswith("Transformer/") for key in state):
        raise UserError(
            f"{path} has JAX's names; let timm convert it: timm.create_model(NAME).load_pretrained(FILE), then "
            "save_file(model.state_dict(), 'weights.safetensors')"
        )
    return state, Told()


def _torch(path: Path) -> tuple[Any, Told]:
    try:
        with torch.serialization.safe_globals(HARMLESS):
            return torch.load(path, map_location="cpu", weights_only=True), Told()
    except Exception as error:  # the reader may raise anything on a damaged or foreign file
        raise UserError(f"{path} {_refusal(str(error))}") from None


READERS: dict[str, Callable[[Path], tuple[Any, Told]]] = {".safetensors": _safetensors, ".npz": _npz}


def _refusal(words: str) -> str:
    """Say in our own words why torch's reader refuses a file: its advice would run the file's code."""
    if found := re.search(r"GLOBAL (\S+)", words):
        return f"cannot be read as plain weights: it holds {found[1]}, and code is never run; {CONVERT}"
    if "TorchScript" in words:
        return f"cannot be read as plain weights: it is a TorchScript program; {CONVERT}"
    if "Unpickler" in words or "Weights only" in words:
        return f"cannot be read as plain weights: it is a pickle that torch.save did not write, or damaged; {CONVERT}"
    return "cannot be read as plain weights: it is damaged or cut off, or of another format; copy it again"


def _state_dict(content: Any, ema: bool) -> Mapping[str, Tensor]:
    """Return the state dict in the content of a file, with or without wrappers."""
    if ema:
        averaged = [
            content[key] for key in EMA if isinstance(content, Mapping) and isinstance(content.get(key), Mapping)
        ]
        if not averaged:
            raise UserError(f"it has no averaged weights ({' or '.join(EMA)}); leave --ema out")
        content = averaged[0]
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not content:
        raise UserError(f"it does not hold a state dict; {CONVERT}")
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise UserError(f"it does not hold a state dict: {key!s:.80} is a {type(value).__name__}; {CONVERT}")
    return content


def _require_sound(state: Mapping[str, Tensor]) -> None:
    """Raise UserError unless every weight holds ordinary numbers, each with its own memory."""
    for key, value in state.items():
        if value.layout != torch.strided or value.is_quantized or value.is_complex():
            raise UserError(f"{key} is {value.layout} of {value.dtype}; save plain tensors of floats")
        if not value.is_floating_point():
            if value.ndim and not key.endswith(INDICES):
                raise UserError(f"{key} is {value.dtype}, as in quantised models; save the weights as floats")
            continue
        if not value.numel():
            raise UserError(
                f"{key} has no values, shape {tuple(value.shape)}; if ZeRO-3 divided them, save the whole weights with "
                "engine.save_16bit_model or DeepSpeed's zero_to_fp32.py"
            )
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise UserError(f"{key} repeats its values in memory; save contiguous tensors")
        if not value.float().isfinite().all():
            raise UserError(f"{key} holds NaN or infinity in float32; take a checkpoint from before training diverged")
