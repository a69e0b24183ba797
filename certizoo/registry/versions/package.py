"""The content of a published version: the files of a hand-over folder and the name of the module that loads them.

MLflow's `loader_module` flavour: nothing is pickled, the registry holds no code, and no requirement is inferred. The
project itself is not a requirement either: its name is not registered on package indices, and whoever registered it
could run code. A server of a version needs the project's code; `files.json` names the commit and digest that published
it.
"""

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from certizoo import UserError
from certizoo.registry.tracking import checks, run_folder, runs
from certizoo.registry.tracking.run_folder import Point
from certizoo.registry.versions import manifest

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.models import ModelSignature

LIBRARIES = ("torch", "torchvision", "timm", "numpy", "safetensors", "pyyaml")  # libraries that models are built with
FILES = "files"  # name of the published files' folder
LOADER = "certify.served"  # the module by which MLflow loads a version; a name, as only certify/ imports it
LOCATION = f"data/{FILES}"  # its place inside a logged model
SUFFIXES = {".safetensors", ".yaml", ".json", ".md", ".html", ".png", ".svg", ".csv", ".parquet", ".txt"}
OWN = (run_folder.STATE, run_folder.PUBLICATION, manifest.FILE)  # files of this package, if they lie there


@contextmanager
def staged(folder: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield the publishable files of `folder`, with files.json, and the tags that bind them, until the block ends."""
    with tempfile.TemporaryDirectory() as scratch:
        files = stage(folder, Path(scratch) / FILES)
        yield files, manifest.write(files)


def log_model(
    client: "MlflowClient",
    files: Path,
    *,
    name: str,
    tags: dict[str, str],
    metrics: Mapping[str, float],
    run_id: str,
) -> str:
    """Log the `staged` files as a model of the run `run_id` and return the model's id.

    This does what `mlflow.pyfunc.log_model` does, without its global state and without reopening the run.
    """
    import mlflow.pyfunc
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model

    experiment = client.get_run(run_id).info.experiment_id
    model = client.create_logged_model(experiment, name, source_run_id=run_id, tags=tags, model_type="classifier")
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*input example", category=UserWarning)
        mlflow.pyfunc.save_model(
            Path(scratch) / "model",
            loader_module=LOADER,
            data_path=str(files),
            pip_requirements=requirements(),
            signature=signature(),
            mlflow_model=Model(model.artifact_location, run_id=run_id, model_id=model.model_id),
        )
        client.log_model_artifacts(model.model_id, str(Path(scratch) / "model"))
    client.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
    at = int((files / manifest.CERTIFICATE).stat().st_mtime * 1000)
    points = [Point(key, value, at, 0) for key, value in metrics.items()]
    runs.log_points(client, run_id, points, model.model_id)
    return str(model.model_id)


def requirements() -> list[str]:
    """Return the installed versions, without the local part, which no index has."""
    found = []
    for library in LIBRARIES:
        try:
            found.append(f"{library}=={version(library).partition('+')[0]}")
        except PackageNotFoundError:
            continue
    return found


def stage(folder: Path, to: Path) -> Path:
    """Collect the publishable files of `folder` under one name, as hard links if the file system allows.

    All files must lie in the folder.
    """
    try:
        checks.inside(folder, ".")
    except ValueError as error:
        raise UserError(f"{folder} is not published: {error}; replace the link by the file itself") from None
    to.mkdir()
    for path in publishable(folder):
        if path.is_dir():
            shutil.copytree(path, to / path.name)
            continue
        try:
            os.link(path.resolve(), to / path.name)
        except OSError:  # another file system
            shutil.copyfile(path, to / path.name)
    return to


def signature() -> "ModelSignature":
    """Return the signature images_BCHW in [0, 1] -> logits_BK, both float32, of any size."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    images, logits = (TensorSpec(np.dtype("float32"), (-1,) * axes) for axes in (4, 2))
    return ModelSignature(inputs=Schema([images]), outputs=Schema([logits]))


def publishable(folder: Path) -> list[Path]:
    """Return the files and subfolders of `folder` that hold data only: no pickles, no code, no state of ours."""

    def is_data(path: Path) -> bool:
        if path.is_dir():
            return all(is_data(child) for child in path.iterdir())
        return path.suffix in SUFFIXES and not path.name.startswith(OWN)

    return sorted(path for path in folder.iterdir() if is_data(path))
