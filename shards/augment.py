"""Augmentations of training, each a function (image, seed) -> pixels_HWC, the same for the same seed.

A sample's seed is `mix(run seed, epoch, key)`: its view does not depend on what was drawn before it, on the
loader's workers, or on whether the epoch was resumed.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from shards.decode import Pixels, fit, pixels_HWC

Augment = Callable[[Image.Image, int], Pixels]
RANDAUG = "rand-m9-mstd0.5-inc1"  # timm's name for the recipe of DeiT
GRAY = (124, 116, 104)  # mean of ImageNet, fills what RandAugment moves away from


def mix(*parts: int | str) -> int:
    """A 63-bit number from whatever identifies a draw; unlike `hash`, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def augmentation(name: str, size: int) -> Augment:
    """`none`, `flip`, `flip_crop`, `inception` or `randaug` to size x size pixels."""
    if name == "none":
        return lambda image, seed: pixels_HWC(fit(image, size))
    if name == "flip":
        return lambda image, seed: flip(pixels_HWC(fit(image, size)), seed)
    if name == "flip_crop":
        return lambda image, seed: flip_crop(pixels_HWC(fit(image, size)), seed)
    transform = _inception(size) if name == "inception" else _randaug(size)

    def seeded_view(image: Image.Image, seed: int) -> Pixels:
        with seeded(seed):
            return pixels_HWC(transform(image))

    return seeded_view


def flip(image_HWC: Pixels, seed: int) -> Pixels:
    """Mirror half of the images."""
    return image_HWC[:, ::-1] if seed % 2 else image_HWC


def flip_crop(image_HWC: Pixels, seed: int) -> Pixels:
    """Shift by up to H/8 pixels into black and mirror half of the images: the draws are digits of the seed."""
    reach = max(image_HWC.shape[0] // 8, 1)
    seed, down = divmod(seed, 2 * reach + 1)
    seed, right = divmod(seed, 2 * reach + 1)
    shifted_HWC = np.zeros_like(image_HWC)
    to_y, from_y = _overlap(down - reach)
    to_x, from_x = _overlap(right - reach)
    shifted_HWC[to_y, to_x] = image_HWC[from_y, from_x]
    return flip(shifted_HWC, seed)


def _overlap(shift: int) -> tuple[slice, slice]:
    """Slices (to, from) of an axis that is moved by `shift`."""
    end = -abs(shift) or None
    return (slice(shift, None), slice(0, end)) if shift >= 0 else (slice(0, end), slice(-shift, None))


def _inception(size: int) -> v2.Transform:
    """Random resized crop (Szegedy et al., https://arxiv.org/abs/1409.4842) and mirror."""
    crop = v2.RandomResizedCrop(size, interpolation=v2.InterpolationMode.BICUBIC, antialias=True)
    return v2.Compose([crop, v2.RandomHorizontalFlip()])


def _randaug(size: int) -> v2.Transform:
    """Inception, then RandAugment (https://arxiv.org/abs/1909.13719) as timm has it."""
    from timm.data.auto_augment import rand_augment_transform  # here: importing timm takes seconds

    hparams = {"translate_const": round(size * 0.45), "img_mean": GRAY}
    return v2.Compose([_inception(size), rand_augment_transform(RANDAUG, hparams)])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed what the libraries draw from (random, numpy, torch's CPU generator) and put it back afterwards."""
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
