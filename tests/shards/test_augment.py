"""Training views: crops are those of the papers, and the fast resizing is Pillow's."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shards.augment import RATIO, SCALE, augmentation, crop_box, resized


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Something smooth with edges, as photographs are."""
    y, x = np.mgrid[0:height, 0:width]
    layers = [127 + 90 * np.sin(x / 7 + n) * np.cos(y / (5 + n)) + 30 * ((x // 9 + y // 13) % 2) for n in range(3)]
    pixels = np.stack(layers, -1).clip(0, 255).astype(np.uint8)
    return Image.fromarray(pixels if mode == "RGB" else pixels[:, :, 0])


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("shape", [(500, 375), (181, 173), (40, 300), (1, 1), (224, 224), (1500, 900)])
def test_resizing_is_that_of_pillow(shape: tuple[int, int], mode: str) -> None:
    image = picture(*shape, mode)
    known = np.asarray(image.resize((224, 224), Image.Resampling.BICUBIC)).astype(int)
    pixels = np.asarray(image)
    ours = resized(pixels if pixels.ndim == 3 else pixels[:, :, None], 224).astype(int).reshape(known.shape)
    assert np.abs(ours - known).max() <= 2
    assert np.abs(ours - known).mean() < 0.1


@settings(deadline=None)
@given(width=st.integers(1, 700), height=st.integers(1, 700), seed=st.integers(0, 2**63 - 1))
def test_crops_lie_in_the_image_and_have_the_right_shape(width: int, height: int, seed: int) -> None:
    left, top, right, bottom = crop_box(width, height, random.Random(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    if min(width, height) > 64 and RATIO[0] <= width / height <= RATIO[1]:  # else the fallback may be needed
        assert SCALE[0] * 0.95 <= (right - left) * (bottom - top) / (width * height) <= SCALE[1]
        assert RATIO[0] * 0.95 <= (right - left) / (bottom - top) <= RATIO[1] * 1.05


def test_crops_go_everywhere_and_half_are_mirrored() -> None:
    boxes = np.array([crop_box(400, 300, random.Random(seed)) for seed in range(2000)])
    left, top, right, bottom = boxes.T
    area = (right - left) * (bottom - top) / (400 * 300)
    assert 0.08 * 0.98 < area.min() < 0.12
    assert 0.4 < area.mean() < 0.55  # uniform in 0.08..1, less what did not fit
    assert ((left == 0).any(), (top == 0).any(), (right == 400).any(), (bottom == 300).any()) == (True,) * 4
    ramp = np.tile(np.arange(256, dtype=np.uint8)[:, None], (256, 1, 1))
    view = augmentation("inception", 32)
    mirrored = [int(pixels[0, 0, 0]) > int(pixels[0, -1, 0]) for pixels in (view(ramp, seed) for seed in range(300))]
    assert 0.4 < np.mean(mirrored) < 0.6
