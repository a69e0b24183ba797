"""The fast decoder gives Pillow's pixels and refuses what Pillow refuses. Without simplejpeg both sides are Pillow."""

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from certizoo import images
from certizoo.images import ImageError, Pixels, pixels

JPEGS: list[dict[str, Any]] = [
    {}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 1}, {"quality": 30}, {"keep_rgb": True},
    {"restart_marker_rows": 1},
]  # fmt: skip


def encoded(mode: str, width: int, height: int, seed: int = 0, file: str = "JPEG", **options: Any) -> bytes:
    """Encode coarse noise, so that every block of the transform has content and colours change within it."""
    shape = (height // 4 + 1, width // 4 + 1, len(Image.new(mode, (1, 1)).getbands()))
    noise = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    image = Image.fromarray(noise.squeeze(2) if mode == "L" else noise, mode=mode).resize((width, height))
    stream = io.BytesIO()
    image.save(stream, file, **options)
    return stream.getvalue()


def of_pillow(data: bytes, channels: int) -> Pixels:
    image = np.asarray(Image.open(io.BytesIO(data)).convert({1: "L", 3: "RGB"}[channels]))
    return image.reshape(*image.shape[:2], channels)


@settings(deadline=None)
@given(
    mode=st.sampled_from(["RGB", "L", "CMYK"]),
    width=st.integers(1, 100),
    height=st.integers(1, 100),
    options=st.sampled_from(JPEGS),
    channels=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
def test_pixels_are_those_of_pillow(
    mode: str, width: int, height: int, options: dict[str, Any], channels: int, seed: int
) -> None:
    data = encoded(mode, width, height, seed, **options)
    assert np.array_equal(pixels(data, channels), of_pillow(data, channels))


def test_other_formats_are_left_to_pillow() -> None:
    data = encoded("RGB", 30, 20, file="PNG")
    assert np.array_equal(pixels(data, 3), of_pillow(data, 3))


def refusal(data: bytes) -> str | None:
    try:
        pixels(data, 3)
    except ImageError as error:
        return str(error)
    return None


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.99])
def test_what_is_cut_is_refused_as_by_pillow(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded("RGB", 100, 80)
    cut = data[: int(len(data) * share)]
    message = refusal(cut)
    monkeypatch.setattr(images, "simplejpeg", None)
    assert message == refusal(cut)
    assert message is not None
    assert message.startswith("the image is corrupt")


def test_a_huge_image_is_refused_as_by_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    assert images._plain_jpeg(encoded("RGB", 20, 20)) is None
