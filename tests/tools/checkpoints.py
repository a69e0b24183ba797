"""The tensors of a checkpoint, assembled by hand from the pieces of all ranks."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def whole(path: Path, key: str) -> dict[str, Tensor]:
    """Return {parameter: all its entries, flat} of the weights ("weight") or of one momentum ("exp_avg", ...)."""
    pieces: dict[str, dict[int, Tensor]] = {}
    for file in sorted(path.glob("rank*.safetensors")):
        for entry, value in load_file(file).items():
            name, start, what = entry.rsplit(":", 2)
            if what == key:
                pieces.setdefault(name, {})[int(start)] = value
    return {name: torch.cat([parts[start] for start in sorted(parts)]) for name, parts in pieces.items()}
