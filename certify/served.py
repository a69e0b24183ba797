"""The loader by which MLflow loads a published version (`mlflow.pyfunc.load_model`), without pickle.

MLflow calls `_load_pyfunc` with the folder of the version's files, which must be those that were published.
"""

from pathlib import Path

import numpy as np
import torch

from certizoo import UserError
from certizoo.inputs import images_given
from certizoo.registry.versions import manifest
from zoo import handover
from zoo.models.factory import input_size


class Served:
    """A model from images (B, C, H, W) in [0,1] to logits (B, J), as NumPy arrays in float32.

    Raises UserError for images of another kind: bytes 0..255, normalised ones, NaN, another shape.
    """

    def __init__(self, folder: Path) -> None:
        self.model, self.config = handover.load(folder)
        self.shape_CHW = input_size(self.config["model"])

    @torch.no_grad()
    def predict(self, images_BCHW: np.ndarray, params: object = None) -> np.ndarray:
        try:
            given_BCHW = torch.from_numpy(np.array(images_BCHW))
        except (TypeError, ValueError) as error:  # ragged lists, text, objects
            raise UserError(f"images are not an array of numbers ({error}); pass float32 (B, C, H, W)") from None
        return self.model(images_given(given_BCHW, self.shape_CHW)).numpy()


def _load_pyfunc(path: str) -> Served:
    manifest.verify_loaded(Path(path))
    return Served(Path(path))
