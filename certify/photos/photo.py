"""A photograph as the model sees it: read within bounds, upright, and resized like an evaluation image."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from certify.photos.samples import FOLDER
from certizoo import UserError
from certizoo.images import MAX_PIXELS, ImageError, pixels
from certizoo.shards.views.fit import fit
from certizoo.text import plain

MAX_BYTES = 32 * 2**20  # of a file; 24 million pixels as JPEG or WEBP take less
ADVICE = f"give a JPEG, PNG or WEBP of at most {MAX_PIXELS / 1e6:.0f} million pixels and {MAX_BYTES >> 20} MiB"


@dataclass(frozen=True)
class Photo:
    """A photograph: `image_CHW` in [0,1]; `width` x `height` is the size in the file."""

    name: str
    image_CHW: Tensor
    width: int
    height: int

    @property
    def resized(self) -> bool:
        return self.image_CHW.shape[1:] != (self.height, self.width)


def read(path: Path, channels: int, size: int) -> Photo:
    """Return the photograph in a file. Raises UserError."""
    if not path.is_file():
        raise UserError(f"there is no file {path}; {ADVICE}")
    try:
        with path.open("rb") as file:
            name = path.name if path.parent == FOLDER else str(path)
            return photo(file.read(MAX_BYTES + 1), name, channels, size)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {ADVICE}") from None


def photo(data: bytes, name: str, channels: int, size: int) -> Photo:
    """Return the photograph in encoded bytes.

    Raises:
        UserError: it is invalid or too large (certizoo/images.py).
    """
    if len(data) > MAX_BYTES:
        raise UserError(f"{name} is larger than {MAX_BYTES >> 20} MiB; {ADVICE}")
    try:
        pixels_HWC = pixels(data, channels)
    except ImageError as error:
        raise UserError(f"{plain(name)[:200]}: {error}; {ADVICE}") from None
    height, width = pixels_HWC.shape[:2]
    seen_CHW = torch.from_numpy(fit(pixels_HWC, size).transpose(2, 0, 1).copy())
    return Photo(plain(name), seen_CHW.float().div(255), width, height)
