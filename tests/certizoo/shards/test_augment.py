"""Training views: crops as in the papers, and fast resizing that equals Pillow's."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from certizoo.shards.views import kernels
from certizoo.shards.views.augment import RATIO, SCALE, augmentation, crop_box, erasing


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Return a smooth image with edges, like a photograph."""
    y, x = np.mgrid[0:height, 0:width]
    layers = [127 + 90 * np.sin(x / 7 + n) * np.cos(y / (5 + n)) + 30 * ((x // 9 + y // 13) % 2) for n in range(3)]
    pixels = np.stack(layers, -1).clip(0, 255).astype(np.uint8)
    return Image.fromarray(pixels if mode == "RGB" else pixels[:, :, 0])


KERNELS = ("opencv", "torch")


@pytest.fixture(params=KERNELS)
def kernels_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with OpenCV, and without it as on a machine that has none."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "cv2", None)
    elif kernels.cv2 is None:
        pytest.skip("OpenCV is not installed: pip install 'certizoo[jpeg]'")
    return str(request.param)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("shape", [(500, 375), (181, 173), (40, 300), (1, 1), (224, 224), (1500, 900)])
def test_resizing_is_that_of_pillow(shape: tuple[int, int], mode: str, interpolation: str, kernels_of: str) -> None:
    image = picture(*shape, mode)
    known = np.asarray(image.resize((224, 224), Image.Resampling[interpolation.upper()])).astype(int)
    pixels = np.asarray(image)
    ours = kernels.resized(pixels if pixels.ndim == 3 else pixels[:, :, None], 224, interpolation)
    assert ours.shape == (224, 224, 3 if mode == "RGB" else 1)
    difference = np.abs(ours.astype(int).reshape(known.shape) - known)
    assert difference.max() <= 2
    # OpenCV rounds weights to 11 bits: up to a quarter of its pixels are off by one level.
    assert difference.mean() < (0.3 if kernels_of == "opencv" and max(shape) <= 224 else 0.1)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("cut", [slice(None), slice(3, 20)])
def test_mirror_and_planes_are_the_same_bytes_by_every_kernel(channels: int, cut: slice, kernels_of: str) -> None:
    whole_HWC = np.random.default_rng(0).integers(0, 256, (31, 23, channels), dtype=np.uint8)
    image_HWC = whole_HWC[:, cut]  # contiguous and strided
    assert np.array_equal(kernels.mirrored(image_HWC), image_HWC[:, ::-1])
    out_CHW = np.zeros((channels, *image_HWC.shape[:2]), np.uint8)
    kernels.write_planes(image_HWC, out_CHW)
    assert np.array_equal(out_CHW, image_HWC.transpose(2, 0, 1))


@settings(deadline=None)
@given(width=st.integers(1, 700), height=st.integers(1, 700), seed=st.integers(0, 2**63 - 1))
def test_crops_lie_in_the_image_and_have_the_right_shape(width: int, height: int, seed: int) -> None:
    left, top, right, bottom = crop_box(width, height, random.Random(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    if min(width, height) > 64 and RATIO[0] <= width / height <= RATIO[1]:  # otherwise the fallback may be needed
        assert SCALE[0] * 0.95 <= (right - left) * (bottom - top) / (width * height) <= SCALE[1]
        assert RATIO[0] * 0.95 <= (right - left) / (bottom - top) <= RATIO[1] * 1.05


def test_erasing_blackens_one_rectangle_of_a_share_of_the_views() -> None:
    view = erasing(lambda image_HWC, seed: image_HWC, 0.5)
    image_HWC = np.full((32, 24, 3), 7, np.uint8)
    black = [(view(image_HWC, seed) == 0).all(2) for seed in range(300)]
    assert 0.4 < np.mean([found.any() for found in black]) < 0.6
    for found in black:
        rows, columns = found.any(1), found.any(0)
        assert found.sum() == rows.sum() * columns.sum() <= 0.36 * found.size
    assert (image_HWC == 7).all()
    assert np.array_equal(view(image_HWC, 1), view(image_HWC, 1))


def test_crops_go_everywhere_and_half_are_mirrored() -> None:
    boxes = np.array([crop_box(400, 300, random.Random(seed)) for seed in range(2000)])
    left, top, right, bottom = boxes.T
    area = (right - left) * (bottom - top) / (400 * 300)
    assert 0.08 * 0.98 < area.min() < 0.12
    assert 0.4 < area.mean() < 0.55  # uniform in 0.08..1, without crops that did not fit
    assert ((left == 0).any(), (top == 0).any(), (right == 400).any(), (bottom == 300).any()) == (True,) * 4
    ramp = np.tile(np.arange(256, dtype=np.uint8)[:, None], (256, 1, 1))
    view = augmentation("inception", 32)
    mirrored = [int(pixels[0, 0, 0]) > int(pixels[0, -1, 0]) for pixels in (view(ramp, seed) for seed in range(300))]
    assert 0.4 < np.mean(mirrored) < 0.6
