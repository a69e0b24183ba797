"""Shared fixtures: an empty registry, digits as shards, and the folder of real images; one thread a process."""

import os
import shutil
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

import certizoo.compat  # noqa: F401  (repairs torchvision before a test module imports timm)
from certizoo.registry.server import store

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # `make test &` in a script inherits a Ctrl-C that is ignored
TESTS = Path(__file__).parent
ROOT = TESTS.parent

# The slowest files, slowest first. They start before the rest, so that both processes of `make test` end together.
# A slow file that is missing here costs at most its own time; a name without a file is refused.
FIRST = (
    "trainers/weights/test_resume.py",
    "trainers/weights/test_no_pickle.py",
    "trainers/engine/test_zero.py",
    "trainers/weights/test_states.py",
    "tuning/test_tune.py",
    "trainers/test_end_to_end.py",
    "trainers/objectives/test_steps.py",
    "certizoo/registry/test_server.py",
    "configs/test_new_attention.py",
    "trainers/doctor/test_doctor.py",
    "certify/image/test_image.py",
    "certizoo/shards/test_remote.py",
    "certify/shared/test_ball.py",
    "zoo/bounds/test_curvature.py",
    "zoo/attention/test_curvature_variants.py",
    "zoo/models/test_models.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put FIRST before all other files, and keep the order otherwise."""
    gone = [name for name in FIRST if not (TESTS / name).is_file()]
    if gone:
        raise pytest.UsageError(f"tests/conftest.py, FIRST: there is no {', '.join(gone)}")
    place = {TESTS / name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder of real image shards, or skip the test with the reason."""
    folder = Path(os.environ.get("CERTIZOO_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real images at {folder}; set CERTIZOO_DATA to a folder with cifar10-*.tar shards")
    return folder


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tables of a fresh store: copying them is faster than making them, which takes seconds."""
    database = tmp_path_factory.mktemp("empty") / "mlflow.db"
    store.connect(f"sqlite:///{database}")
    return database


@pytest.fixture
def store_in(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URI of an empty registry in tmp_path, the current folder, with its own cache."""
    shutil.copy(empty_database, tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("CERTIZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the shards of scikit-learn's digits, read-only; a test that changes them takes a copy."""
    from certizoo.shards.__main__ import main

    folder = tmp_path_factory.mktemp("digits")
    main(["digits", str(folder)])
    return folder


@pytest.fixture(scope="module")
def folder(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the runs of a file, with the digits where `data=digits` looks for them."""
    folder = tmp_path_factory.mktemp("folder")
    shutil.copytree(digits, folder / "data" / "digits")
    return folder
