"""Training augmentations, each a function (image_HWC, seed) -> view_HWC, deterministic for a seed.

A sample's seed is `mix(run seed, epoch, key)`: its view depends neither on earlier draws, nor on the loader's workers,
nor on whether the epoch was resumed.
"""

import hashlib
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image

from certizoo.images import Pixels
from certizoo.shards.views.fit import fit
from certizoo.shards.views.kernels import mirrored, resized

Augment = Callable[[Pixels, int], Pixels]
JITTER = (0.4, 0.4, 0.4)  # of brightness, contrast and saturation: timm's defaults
RANDAUG = "rand-m9-mstd0.5-inc1"  # timm's name for the recipe of DeiT
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of a random resized crop
GRAY = (124, 116, 104)  # mean of ImageNet, fills the area that RandAugment uncovers


def mix(*parts: int | str) -> int:
    """Return a 63-bit number from the values that identify a draw; unlike `hash`, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def augmentation(name: str, size: int, interpolation: str = "bilinear") -> Augment:
    """Return the augmentation `name` to size x size pixels.

    Names: `none`, `flip`, `flip_crop`, `flip_crop_jitter`, `inception`, `randaug`. The crops of the last two are
    resized `bilinear` or `bicubic`.
    """
    if name == "none":
        return lambda image_HWC, seed: fit(image_HWC, size)
    if name == "flip":
        return lambda image_HWC, seed: flip(fit(image_HWC, size), seed)
    if name == "flip_crop":
        return lambda image_HWC, seed: flip_crop(fit(image_HWC, size), seed)
    if name == "flip_crop_jitter":
        return _flip_crop_jitter(size)
    return {"inception": _inception, "randaug": _randaug}[name](size, interpolation)


def flip(image_HWC: Pixels, seed: int) -> Pixels:
    """Mirror half of the images."""
    return mirrored(image_HWC) if seed % 2 else image_HWC


def flip_crop(image_HWC: Pixels, seed: int) -> Pixels:
    """Shift by up to H/8 pixels, fill with black, and mirror half of the images: the draws are digits of the seed."""
    reach = max(image_HWC.shape[0] // 8, 1)
    seed, down = divmod(seed, 2 * reach + 1)
    seed, right = divmod(seed, 2 * reach + 1)
    shifted_HWC = np.zeros_like(image_HWC)
    to_y, from_y = _overlap(down - reach)
    to_x, from_x = _overlap(right - reach)
    shifted_HWC[to_y, to_x] = image_HWC[from_y, from_x]
    return flip(shifted_HWC, seed)


def _flip_crop_jitter(size: int) -> Augment:
    """Apply torchvision's colour jitter, then flip_crop, so that the filled area stays black."""
    from torchvision.transforms import ColorJitter  # imported here because it takes a second

    import certizoo.compat  # noqa: F401  (repairs torchvision)

    jitter = ColorJitter(*JITTER)

    def view(image_HWC: Pixels, seed: int) -> Pixels:
        with seeded(seed):
            coloured_HWC = np.asarray(jitter(Image.fromarray(fit(image_HWC, size))))
        return flip_crop(coloured_HWC, seed)

    return view


def _overlap(shift: int) -> tuple[slice, slice]:
    """Return the slices (to, from) of an axis that is moved by `shift`."""
    end = -abs(shift) or None
    return (slice(shift, None), slice(0, end)) if shift >= 0 else (slice(0, end), slice(-shift, None))


def _inception(size: int, interpolation: str) -> Augment:
    """Random resized crop (Szegedy et al., https://arxiv.org/abs/1409.4842) and mirror."""

    def view(image_HWC: Pixels, seed: int) -> Pixels:
        draw = random.Random(seed)
        height, width, _ = image_HWC.shape
        left, top, right, bottom = crop_box(width, height, draw)
        return flip(resized(image_HWC[top:bottom, left:right], size, interpolation), draw.getrandbits(1))

    return view


def _randaug(size: int, interpolation: str) -> Augment:
    """Inception, then RandAugment (https://arxiv.org/abs/1909.13719) as in timm."""
    from timm.data.auto_augment import rand_augment_transform  # imported here because it takes seconds

    inception = _inception(size, interpolation)
    rand_augment = rand_augment_transform(RANDAUG, {"translate_const": round(size * 0.45), "img_mean": GRAY})

    def view(image_HWC: Pixels, seed: int) -> Pixels:
        with seeded(seed):
            return np.asarray(rand_augment(Image.fromarray(inception(image_HWC, seed))))

    return view


def erasing(augment: Augment, probability: float) -> Augment:
    """Blacken a rectangle of views with this probability (https://arxiv.org/abs/1708.04896), as timm chooses it."""
    from timm.data.random_erasing import RandomErasing  # imported here because it takes seconds

    erase = RandomErasing(probability, mode="const", device="cpu")

    def view(image_HWC: Pixels, seed: int) -> Pixels:
        seen_HWC = np.array(augment(image_HWC, seed))
        with seeded(mix(seed, "erase")):
            erase(torch.from_numpy(seen_HWC).permute(2, 0, 1))
        return seen_HWC

    return view


def crop_box(width: int, height: int, draw: random.Random) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) of a crop with SCALE of the area and RATIO of width to height.

    If ten draws do not fit, return the central crop of the nearest ratio.
    """
    for _ in range(10):
        area = width * height * draw.uniform(*SCALE)
        ratio = math.exp(draw.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = draw.randint(0, width - w), draw.randint(0, height - h)
            return left, top, left + w, top + h
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of the libraries (random, numpy, torch's CPU generator) and restore them afterwards."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])
