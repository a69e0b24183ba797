"""Shared fixtures: one thread a process, an empty registry, and where the real images are."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

import certizoo.compat  # noqa: F401  (repairs torchvision before a test module imports timm)
from registry import store

torch.set_num_threads(1)
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real image shards; tests that need it skip, with the reason, where it is absent."""
    folder = Path(os.environ.get("CERTIZOO_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real images at {folder}; set CERTIZOO_DATA to a folder with cifar10-*.tar shards")
    return folder


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tables of a fresh store: making them takes seconds, copying them does not."""
    database = tmp_path_factory.mktemp("empty") / "mlflow.db"
    store.connect(f"sqlite:///{database}")
    return database
