"""A photograph is read as the loader reads it, and an image bomb is refused at its header."""

import struct
import time
import zlib
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image

from certify.photos import photo
from certizoo import UserError
from certizoo.images import pixels
from certizoo.shards.views.fit import fit


def encoded(width: int, height: int, kind: str = "PNG", **options: object) -> bytes:
    generator = torch.Generator().manual_seed(width)
    array = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    buffer = BytesIO()
    Image.fromarray(array.numpy()).save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(("width", "height"), [(32, 32), (640, 480), (20, 31), (500, 33)])
def test_any_size_is_seen_as_the_loader_sees_it(width: int, height: int) -> None:
    data = encoded(width, height)
    seen = photo.photo(data, "x.png", 3, 32)
    loader = fit(pixels(data, 3), 32)
    assert torch.equal(seen.image_CHW, torch.from_numpy(loader.copy()).permute(2, 0, 1).float() / 255)
    assert (seen.width, seen.height, seen.resized) == (width, height, (width, height) != (32, 32))


def test_a_photograph_that_lies_on_its_side_is_turned() -> None:
    """Phones record their orientation in EXIF; the values of EXIF's orientation 6 are a quarter turn."""
    exif = Image.Exif()
    exif[0x0112] = 6
    wide = photo.photo(encoded(40, 20, exif=exif), "x.png", 3, 16)
    assert (wide.width, wide.height) == (20, 40)
    one, other = (photo.photo(data, "x.png", 3, 16) for data in (encoded(16, 16), encoded(16, 16, exif=exif)))
    assert torch.equal(other.image_CHW, one.image_CHW.rot90(-1, (1, 2)))


LARGE = bytes(photo.MAX_BYTES + 1)


def png_bomb() -> bytes:
    """Return 60,000 x 60,000 pixels in a few hundred bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


@pytest.mark.hostile
@pytest.mark.parametrize(
    "data",
    [png_bomb(), b"", b"GIF89a" + bytes(100), encoded(64, 64, "TIFF"), encoded(64, 64)[:500], LARGE],
    ids=["bomb", "empty", "gif", "tiff", "cut off", "too many bytes"],
)  # fmt: skip
def test_a_file_that_is_not_a_photograph_is_one_line_at_once(data: bytes) -> None:
    start = time.process_time()
    with pytest.raises(UserError, match="give a JPEG, PNG or WEBP of at most 24 million pixels") as error:
        photo.photo(data, "x\x1b[31m.png", 3, 32)
    assert time.process_time() - start < 2
    assert "\x1b" not in str(error.value)


def test_a_file_is_read_no_further_than_its_bound(tmp_path: Path) -> None:
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(2**40)  # of holes
    with pytest.raises(UserError, match="larger than 32 MiB"):
        photo.read(tmp_path / "large.png", 3, 32)
    with pytest.raises(UserError, match="there is no file"):
        photo.read(tmp_path / "none.png", 3, 32)
