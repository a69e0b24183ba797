"""Fixtures: a small model of digits, and photographs for it."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from certify.photos.predict import Asked, Predictor
from certizoo import shards
from tests.tools.stage_runs import data


@pytest.fixture(scope="session")
def predict(handover: Path, tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return Predictor(handover, Asked(method="adjoint", nonce="0", steps=10), tmp_path_factory.mktemp("refuted"))


@pytest.fixture(scope="session")
def digit(digits: Path) -> Callable[..., bytes]:
    """Return the encoded n-th test image, enlarged by whole pixels `times`."""
    config = data(digits)
    batches = shards.eval_loader(shards.find(config, "test"), config, batch_size=8)
    _, images_BCHW, _ = next(iter(batches))

    def encoded(number: int = 0, times: int = 1, kind: str = "PNG") -> bytes:
        image = Image.fromarray(np.asarray(images_BCHW[number, 0].mul(255).byte()))
        buffer = BytesIO()
        image.resize((8 * times, 8 * times), Image.Resampling.NEAREST).save(buffer, kind)
        return buffer.getvalue()

    return encoded
