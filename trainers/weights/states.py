"""A checkpoint's tensors: safetensors, which hold numbers and names and no code.

    rank00000.safetensors ...   {"NAME:START:KEY": entries}, each rank's pieces (trainers/engine/share.py), float32
    buffers.safetensors         by name, as the model has them; written by rank 0

The pieces of all files together are every entry of every parameter exactly once. So any number of ranks can read the
files of any other number, each its own part (the idea of docs/references.md#universal-checkpointing). A file may come
from anywhere, so all its names and shapes are checked against the model before a number is copied.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from certizoo import UserError
from trainers.engine.share import Piece, Share

BUFFERS = "buffers.safetensors"
UNREADABLE = (OSError, ValueError, SafetensorError, RecursionError)
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64", torch.int64: "I64", torch.bool: "BOOL"}


def rank_file(rank: int) -> str:
    return f"rank{rank:05d}.safetensors"


def write(share: Share, folder: Path, rank: int) -> list[Path]:
    """Write this rank's files."""
    pieces = {
        f"{piece.name}:{piece.start}:{key}": share.part(piece, key)
        for piece in share.written
        for key in share.keys[piece.name]
    }
    contents = {rank_file(rank): pieces} | ({BUFFERS: share.buffers} if rank == 0 else {})
    for name, tensors in contents.items():
        write_file(folder / name, tensors)
    return [folder / name for name in contents]


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write to the disk and read again. Raises OSError if the file does not hold the tensors."""
    kept = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    save_file(kept, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    with safe_open(path, "pt") as found:
        if not all(_same_bits(found.get_tensor(key), value) for key, value in kept.items()):
            raise OSError(f"{path.name} does not hold what was written")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


# reading -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stretch:
    """Entries [start, end) of one parameter or momentum in a file."""

    start: int
    end: int
    tensor: Any  # a safetensors slice: read only when indexed


Stretches = dict[tuple[str, str], list[Stretch]]


def read(share: Share, folder: Path, files: list[str], step: int) -> None:
    """Overwrite the share with the state after `step` steps from the files of all ranks.

    Raises:
        UserError: a file is not of this model and optimiser, entry by entry, or holds values that are not finite.
    """
    with ExitStack() as opened, one_line(folder):
        stretches = _stretches([opened.enter_context(safe_open(folder / name, "pt")) for name in sorted(files)])
        _fit(share, stretches)
        share.begin(step)
        for piece in share.pieces:
            for key in share.keys[piece.name]:
                _fill(share.part(piece, key), piece, stretches[piece.name, key])
    for name, value in read_file(folder / BUFFERS, share.buffers).items():
        share.buffers[name].copy_(value)


def read_file(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Call `read_exact` on a file of a checkpoint."""
    with one_line(path.parent):
        return read_exact(path, expected)


def read_exact(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read a file that has exactly the names, shapes and types of `expected`, and only finite values.

    Raises one of UNREADABLE.
    """
    with safe_open(path, "pt") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  (not a mapping)
        if slices.keys() != expected.keys():
            raise ValueError(f"{path.name} has other names: {_some(slices.keys() ^ expected.keys())}")
        for key, found in slices.items():
            form = (found.get_dtype(), tuple(found.get_shape()))
            if form != (DTYPES.get(expected[key].dtype), tuple(expected[key].shape)):
                raise ValueError(f"{path.name}: {key} is {form[0]} of shape {form[1]}")
        return {key: _numbers(file.get_tensor(key), key) for key in slices}


def _stretches(opened: list[Any]) -> Stretches:
    found: Stretches = {}
    for file in opened:
        for entry in file.keys():  # noqa: SIM118
            name, start, key = entry.rsplit(":", 2)
            tensor = file.get_slice(entry)
            shape = tensor.get_shape()
            if tensor.get_dtype() != "F32" or len(shape) != 1 or not start.isdecimal() or len(start) > 18:
                raise ValueError(f"{entry} is not a piece of a parameter")
            found.setdefault((name, key), []).append(Stretch(int(start), int(start) + shape[0], tensor))
    for stretches in found.values():
        stretches.sort(key=lambda stretch: stretch.start)
    return found


def _fit(share: Share, stretches: Stretches) -> None:
    """Check that the pieces together cover all entries, each once."""
    wanted = {(name, key) for name, keys in share.keys.items() for key in keys}
    if stretches.keys() != wanted:
        raise ValueError(f"it has other parameters: {_some(map(':'.join, stretches.keys() ^ wanted))}")
    for (name, key), parts in stretches.items():
        starts, ends = [part.start for part in parts], [part.end for part in parts]
        if [0, *ends] != [*starts, share.sizes[name]]:
            raise ValueError(f"the pieces of {name}:{key} do not cover {share.sizes[name]} entries once each")


def _fill(target: Tensor, piece: Piece, parts: list[Stretch]) -> None:
    for part in parts:
        start, end = max(piece.start, part.start), min(piece.start + piece.size, part.end)
        if start < end:
            values = _numbers(part.tensor[start - part.start : end - part.start], piece.name)
            target[start - piece.start : end - piece.start].copy_(values)


def _numbers(values: Tensor, name: str) -> Tensor:
    if values.is_floating_point() and not values.isfinite().all():
        raise ValueError(f"{name} holds values that are not finite")
    return values


def _some(names: Any) -> str:
    return ", ".join(sorted(names)[:3])


@contextmanager
def one_line(folder: Path) -> Iterator[None]:
    """Turn the errors of a damaged file, or of another model's, into a UserError."""
    try:
        yield
    except UNREADABLE as error:
        raise UserError(
            f"{folder} cannot be loaded ({str(error)[:200]}); delete it to resume from the previous checkpoint"
        ) from None
