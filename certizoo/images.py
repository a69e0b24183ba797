"""Decode an image file to pixels: the one reader of pictures for shards, photographs and the contact sheet.

    bytes -> size checked -> decoded -> upright -> on white -> RGB, or gray

A camera stores a picture as its sensor lies and adds an orientation tag; every reader gets the picture upright.
Transparent pixels show white. H, W: height, width; C: channels.
"""

import io
import re
import warnings
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from certizoo.errors import UserError

try:
    import simplejpeg
except ImportError:  # the extra `jpeg` is not installed
    simplejpeg = None

MAX_PIXELS = 24_000_000  # 72 MB decoded; the writer shrinks the largest photographs of ImageNet
MAX_SCANS = 64  # of a progressive JPEG, each of which passes over all pixels; 10 are usual
SCAN = re.compile(b"\xff\xda")  # the scan marker, which never occurs in pixel data
FORMATS = ("JPEG", "PNG", "WEBP")
EIGHT_BIT_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "RGBa")
MODE_OF = {1: "L", 3: "RGB"}
PLAIN_COLOURS = ("YCbCr", "RGB", "Gray")  # the decoders differ on CMYK, by 2 levels of 255
ORIENTATION = 0x0112  # EXIF's tag
ORIENTED = (b"Exif", b"tiff:Orientation")  # without these bytes a JPEG has no tag
# value of the tag -> the turn that makes the picture upright; 1 is upright
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Pixels = NDArray[np.uint8]

# Images large enough for Pillow's warning are refused here with a one-line error; EXIF that is damaged is not needed.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", message="Corrupt EXIF data", category=UserWarning)


class ImageError(UserError):
    """A fault of an image, without its name and the advice, which each caller adds."""


def pixels(data: bytes, channels: int) -> Pixels:
    """Return the picture in `data` as (H, W, `channels`). Raises `ImageError` as `picture` does."""
    soon_HWC = _plain_jpeg(data) if channels == 3 else None
    return array_of(picture(data), channels) if soon_HWC is None else soon_HWC


def picture(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return the picture in `data`, gray or RGB, upright and on white; its `format` is that of the file.

    Raises `ImageError` if it is corrupt, huge or not 8-bit.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        _refuse_large(image, data, max_pixels)
        image.load()
        shown = flattened(image)
        shown.format = image.format
        return shown
    except ImageError:
        raise
    except UnidentifiedImageError:  # its message is a memory address
        raise ImageError(f"the image is corrupt (no {', '.join(FORMATS)})") from None
    except Exception as error:  # hostile bytes make decoders raise anything
        reason = " ".join(str(error).split())[:120]
        raise ImageError(f"the image is corrupt ({reason})") from None


def flattened(image: Image.Image) -> Image.Image:
    """Return a decoded image upright, on white, and as gray (L) or RGB. Raises `ImageError` unless it is 8-bit."""
    if image.mode not in EIGHT_BIT_MODES:
        raise ImageError(f"the image has mode {image.mode}, not gray or colour of 8 bits per channel")
    turn = _turn_of(image)
    upright = image if turn is None else image.transpose(turn)
    if upright.has_transparency_data:
        colours = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours)
    return upright if upright.mode in MODE_OF.values() else upright.convert("RGB")


def array_of(image: Image.Image, channels: int) -> Pixels:
    """Return a gray or RGB image as (H, W, `channels`)."""
    mode = MODE_OF[channels]
    array = np.asarray(image if image.mode == mode else image.convert(mode))
    return array if array.ndim == 3 else array[:, :, None]


def scans_of(data: bytes) -> int:
    """Return the number of scans of a JPEG, at most MAX_SCANS + 1; three times as fast as `bytes.count`."""
    return sum(1 for _ in islice(SCAN.finditer(data), MAX_SCANS + 1))


def _plain_jpeg(data: bytes) -> Pixels | None:
    """Decode exactly as Pillow would, in two thirds of the time.

    Returns None for anything but a plain, complete, upright JPEG of bounded size, and without simplejpeg; Pillow then
    decides.
    """
    if simplejpeg is None:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if colours not in PLAIN_COLOURS or height * width > MAX_PIXELS or scans_of(data) > MAX_SCANS:
            return None
        if any(tag in data for tag in ORIENTED) and _turn_of(Image.open(io.BytesIO(data), formats=FORMATS)) is not None:
            return None
        image_HWC: Pixels = simplejpeg.decode_jpeg(data, "RGB")
    except Exception:  # hostile bytes
        return None
    return image_HWC


def _turn_of(image: Image.Image) -> Image.Transpose | None:
    """Return the turn that the orientation tag asks for; metadata that cannot be read ask for none."""
    try:
        return TURNS.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # hostile metadata
        return None


def _refuse_large(image: Image.Image, data: bytes, max_pixels: int) -> None:
    """Raise `ImageError` for a header that promises more pixels, or passes over them, than decoding may cost."""
    width, height = image.size
    if width * height > max_pixels:
        raise ImageError(f"the image is {width} x {height} pixels, more than {max_pixels / 1e6:.0f} million")
    if image.format in ("JPEG", "MPO") and scans_of(data) > MAX_SCANS:
        raise ImageError(f"the image is drawn in more than {MAX_SCANS} scans")
