"""A loader module in the form that MLflow calls, for models of one matrix."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


class Loaded:
    def __init__(self, folder: str) -> None:
        self.weight = load_file(Path(folder) / "model.safetensors")["weight"]

    def predict(self, images: np.ndarray, params: object = None) -> np.ndarray:
        return images.mean(axis=(2, 3)) @ self.weight


_load_pyfunc = Loaded
