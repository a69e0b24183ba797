"""Decode bytes to pixels, after the size has been checked.

H, W: height, width; C: channels. Pixels are uint8 until a batch leaves the loader as float32 in [0, 1].
"""

import io
import re
import warnings
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from certizoo.shards.tar import MEND_SAMPLE, SampleError

try:
    import simplejpeg
except ImportError:  # the extra `jpeg` is not installed
    simplejpeg = None

MAX_PIXELS = 24_000_000  # 72 MB decoded; the writer shrinks the largest photographs of ImageNet
MAX_SCANS = 64  # of a progressive JPEG, each of which passes over all pixels; 10 are usual
SCAN = re.compile(b"\xff\xda")  # the scan marker, which never occurs in pixel data
FORMATS = ("JPEG", "PNG", "WEBP")
EIGHT_BIT_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "La", "RGBa")
MODE_OF = {1: "L", 3: "RGB"}
PLAIN_COLOURS = ("YCbCr", "RGB", "Gray")  # the decoders differ on CMYK, by 2 levels of 255
CROP_RATIO = 224 / 256  # centre crop of photographs: the usual protocol of ImageNet

Pixels = NDArray[np.uint8]

# Images large enough for Pillow's warning are refused here with a one-line error.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def pixels(data: bytes, where: str, channels: int) -> Pixels:
    """Return the image in `data` as (H, W, `channels`). Raises `SampleError` as `decode` does."""
    soon_HWC = _plain_jpeg(data) if channels == 3 else None
    return _array(_with_channels(decode(data, where), channels)) if soon_HWC is None else soon_HWC


def upright(data: bytes, where: str, channels: int) -> Pixels:
    """Return the same after applying a photograph's orientation tag. Raises `SampleError` as `decode` does."""
    image = decode(data, where)
    try:
        turned = ImageOps.exif_transpose(image)
    except Exception:  # hostile metadata
        turned = image
    return _array(_with_channels(turned, channels))


def _plain_jpeg(data: bytes) -> Pixels | None:
    """Decode exactly as Pillow would, in two thirds of the time.

    Returns None for anything but a plain, complete JPEG of bounded size, and without simplejpeg; Pillow then decides.
    """
    if simplejpeg is None:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if colours not in PLAIN_COLOURS or height * width > MAX_PIXELS or scans_of(data) > MAX_SCANS:
            return None
        image_HWC: Pixels = simplejpeg.decode_jpeg(data, "RGB")
    except Exception:  # hostile bytes
        return None
    return image_HWC


def scans_of(data: bytes) -> int:
    """Return the number of scans of a JPEG, at most MAX_SCANS + 1; three times as fast as `bytes.count`."""
    return sum(1 for _ in islice(SCAN.finditer(data), MAX_SCANS + 1))


def decode(data: bytes, where: str, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Load the image in `data`. Raises `SampleError`, starting with `where`, if it is corrupt, huge or not 8-bit."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        fault = _fault_of_header(image, max_pixels) or _fault_of_scans(image, data)
        if fault is None:
            image.load()
    except UnidentifiedImageError:  # its message is a memory address
        raise SampleError(f"{where}: the image is corrupt (no {', '.join(FORMATS)}); {MEND_SAMPLE}") from None
    except Exception as error:  # hostile bytes make decoders raise anything
        reason = " ".join(str(error).split())[:120]
        raise SampleError(f"{where}: the image is corrupt ({reason}); {MEND_SAMPLE}") from None
    if fault is not None:
        raise SampleError(f"{where}: {fault}; {MEND_SAMPLE}")
    return image


def _fault_of_header(image: Image.Image, max_pixels: int) -> str | None:
    width, height = image.size
    if width * height > max_pixels:
        return f"the image is {width} x {height} pixels, more than {max_pixels / 1e6:.0f} million"
    if image.mode not in EIGHT_BIT_MODES:
        return f"the image has mode {image.mode}, not 8 bits per channel"
    return None


def _fault_of_scans(image: Image.Image, data: bytes) -> str | None:
    scans = scans_of(data) if image.format in ("JPEG", "MPO") else 0
    return f"the image is drawn in more than {MAX_SCANS} scans" if scans > MAX_SCANS else None


def _with_channels(image: Image.Image, channels: int) -> Image.Image:
    """Convert to gray (1) or RGB (3)."""
    mode = MODE_OF[channels]
    return image if image.mode == mode else image.convert(mode)


def _array(image: Image.Image) -> Pixels:
    array = np.asarray(image)
    return array if array.ndim == 3 else array[:, :, None]


def fit(image_HWC: Pixels, size: int) -> Pixels:
    """Return the evaluation view, size x size: the image itself if it fits, else the resized centre (bicubic).

    A larger image is resized to short side size / CROP_RATIO and cropped. A smaller one is enlarged to short side
    `size`, so that nothing of it is lost.
    """
    if image_HWC.shape[:2] == (size, size):
        return image_HWC
    image = Image.fromarray(image_HWC.squeeze(2) if image_HWC.shape[2] == 1 else image_HWC)
    short = size if min(image.size) <= size else round(size / CROP_RATIO)
    resized = F.resize(image, [short], interpolation=v2.InterpolationMode.BICUBIC, antialias=True)
    return _array(F.center_crop(resized, [size, size]))
