"""The loader by which MLflow loads a published version (`mlflow.pyfunc.load_model`), without pickle.

MLflow calls `_load_pyfunc` with the folder of the version's files, which must be those that were published.
"""

from pathlib import Path

import numpy as np
import torch

from certizoo.registry import manifest
from zoo import handover


class Served:
    """A model from images (B, C, H, W) in [0,1] to logits (B, J), as NumPy arrays in float32."""

    def __init__(self, folder: Path) -> None:
        self.model, self.config = handover.load(folder)

    @torch.no_grad()
    def predict(self, images_BCHW: np.ndarray, params: object = None) -> np.ndarray:
        return self.model(torch.as_tensor(images_BCHW, dtype=torch.float32)).numpy()


def _load_pyfunc(path: str) -> Served:
    manifest.verify_loaded(Path(path))
    return Served(Path(path))
