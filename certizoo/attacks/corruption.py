"""Common corruptions (Hendrycks & Dietterich 2019, https://arxiv.org/abs/1903.12261): noise, blur, weather, digital.

    x' = corruption(x, severity)          severity 1 to 5; a random draw, not an adversarial search

The only module that imports imagecorruptions (extra `corruptions`), whose constants are those of ImageNet-C. The
library needs 8 bits per channel, three channels and at least 32 pixels a side. A gray image is passed as three equal
channels, and the first is taken back.

Legend: B batch, C channels, H W pixels.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from certizoo import UserError
from certizoo.attacks.attack import Draws
from certizoo.config.schema import OneOf, Section
from certizoo.inputs import labels_given
from certizoo.nearest import unknown

COMMON = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
SEEDED = ("impulse_noise", "glass_blur")  # these two do not draw from numpy's global generator
LEAST_SIDE = 32
INSTALL = "pip install 'certizoo[corruptions]'"


@dataclass(frozen=True)
class Corruption(Section):
    """One of COMMON at a severity of 1 to 5. Raises UserError for another name, or if the library is missing."""

    norm: ClassVar[str] = "none"
    eps: ClassVar[float | None] = None
    together: ClassVar[bool] = False
    name: str
    severity: Annotated[int, OneOf(1, 2, 3, 4, 5)] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name not in COMMON:
            raise unknown("corruption", self.name, COMMON)
        if find_spec("imagecorruptions") is None:
            raise UserError(f"corruption: imagecorruptions is not installed; {INSTALL}")

    def require_model(self, model: nn.Module, classes: int, side: int) -> None:
        """Raise UserError for small images."""
        if side < LEAST_SIDE:
            raise UserError(f"corruption: images need {LEAST_SIDE} pixels a side or more, but these have {side}")

    def run(self, model: nn.Module, images_BCHW: Tensor, labels_B: Tensor, draws: Draws = None) -> Tensor:
        """Return corrupted_BCHW, of 8 bits per channel; the model and the labels are not used."""
        labels_given(images_BCHW, labels_B)
        self.require_model(model, 0, min(images_BCHW.shape[2:]))
        if images_BCHW.shape[1] not in (1, 3):
            raise UserError(f"corruption: images have 1 or 3 channels, not {images_BCHW.shape[1]}")
        bytes_BHWC = (images_BCHW.detach() * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        seeds_B = _seeds(len(images_BCHW), draws)
        corrupted = [self._one(image, seed) for image, seed in zip(bytes_BHWC, seeds_B, strict=True)]
        return torch.stack([*map(torch.from_numpy, corrupted)]).permute(0, 3, 1, 2).to(images_BCHW) / 255

    def _one(self, image_HWC: np.ndarray, seed: int) -> np.ndarray:
        from imagecorruptions import corrupt

        options = {"seed": seed} if self.name in SEEDED else {}
        with _numpy_seeded(seed):
            corrupted_HW3 = corrupt(image_HWC, corruption_name=self.name, severity=self.severity, **options)
        return np.ascontiguousarray(corrupted_HW3[..., : image_HWC.shape[2]])


def _seeds(count: int, draws: Draws) -> list[int]:
    """Return one 32-bit seed per image."""
    if isinstance(draws, Sequence):
        return [int(torch.randint(2**32, (1,), generator=of_image, device=of_image.device)) for of_image in draws]
    place = draws.device if draws is not None else "cpu"
    return torch.randint(2**32, (count,), generator=draws, device=place).tolist()


@contextmanager
def _numpy_seeded(seed: int) -> Iterator[None]:
    """Seed numpy's global generator, from which the library draws, and restore it afterwards."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)
