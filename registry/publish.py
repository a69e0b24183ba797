"""Publish a finished run: a registered model version, only ever with its certificate.

What the certificate says stands in the version's tags and in the metrics of the logged model behind it.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from certizoo import UserError
from registry import champion, package, records, spool, store

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)
SPOOL = "publish_spool.json"
DIGEST = "certificate_sha256"  # tag: with the run's id, what a version is recognised by
TRIAL = "trial"  # tag: a trial of a search has one version, however often it was restarted and sent
MAX_DESCRIPTION = 5000  # characters, the width of MLflow's column


@dataclass(frozen=True)
class Published:
    """A registered version; `version` is None while the publication waits in its spool, `uri`."""

    name: str
    version: str | None
    uri: str
    champion: bool


@dataclass(frozen=True)
class Request:
    """Everything a publication needs, as it is spooled."""

    folder: str
    name: str
    loader_module: str
    tags: dict[str, str]
    description: str
    metrics: dict[str, float]
    run_id: str | None
    experiment: str
    headline: str
    uri: str


def publish(
    folder: Path,
    *,
    name: str,
    loader_module: str,
    tags: Mapping[str, object],
    description: str,
    metrics: Mapping[str, float],
    run_id: str | None,
    experiment: str,
    headline: str,
    uri: str | None = None,
    run_dir: Path | None = None,
) -> Published:
    """Register the files of `folder` as the next version of `name`; the same certificate of a run only once.

    Args:
        loader_module: name of an importable module with `_load_pyfunc(folder) -> object with predict(images)`, by
            which `mlflow.pyfunc.load_model` builds the model from the published files.
        tags: facts of the certificate; must hold `dataset` and the tag named by `headline`, the accuracy in
            [0, 1] that the alias `champion` goes by.
        description: the model card, Markdown.
        run_id: the run the model comes from, as given by `Tracker.start`; None makes a run for it.
        run_dir: where the publication is spooled if MLflow is away; by default the parent of `folder`.

    Raises `UserError` without a readable `certificate.json` in `folder`.
    """
    run_dir = Path(run_dir or Path(folder).absolute().parent)
    request = Request(
        folder=os.path.relpath(Path(folder).absolute(), run_dir.absolute()),  # a run folder may be moved
        name=name,
        loader_module=loader_module,
        tags={records.clean_name(key): str(value) for key, value in tags.items()},
        description=description,
        metrics={key: float(value) for key, value in metrics.items()},
        run_id=run_id,
        experiment=experiment,
        headline=records.clean_name(headline),
        uri=store.public(store.resolve_uri(uri)),
    )
    check(request, run_dir)
    try:
        return _send(request, run_dir, store.resolve_uri(uri))
    except store.Away as away:
        (run_dir / SPOOL).write_text(json.dumps(asdict(request)))
        logger.warning("%s. %s is kept: publish it by `python -m registry sync %s`", away, run_dir / SPOOL, run_dir)
        return Published(name, None, str(run_dir / SPOOL), champion=False)


def sync(run_dir: Path, uri: str | None = None) -> Published | None:
    """Perform the publication that waits in a run folder; None if none waits."""
    if not (run_dir / SPOOL).is_file():
        return None
    request = Request(**json.loads((run_dir / SPOOL).read_text()))
    check(request, run_dir)
    published = _send(request, run_dir, store.recorded_uri(uri, request.uri))
    (run_dir / SPOOL).unlink()
    return published


def check(request: Request, run_dir: Path) -> None:
    """Refuse what must not be registered, before anything is sent."""
    certificate = run_dir / request.folder / "certificate.json"
    if not certificate.is_file():
        raise UserError(f"{certificate} is missing: a run without a certificate is not published; certify it first")
    try:
        json.loads(certificate.read_text())
    except ValueError:
        raise UserError(f"{certificate} is not JSON; delete it and certify again") from None
    if not re.fullmatch(r"[\w.-]+", request.name):
        raise UserError(f"registered model name {request.name!r}: use letters, digits, '_', '-' and '.' only")
    if find_spec(request.loader_module) is None:
        raise UserError(f"loader_module {request.loader_module!r} cannot be imported; name a module of the project")
    for tag in ("dataset", request.headline):
        if tag not in request.tags:
            raise UserError(f"tag {tag!r} is missing from the publication of {request.name}; add it to tags")


def _send(request: Request, run_dir: Path, uri: str) -> Published:
    store.use_defaults()
    with store.one_line(uri):
        client = store.connect(uri)
        if spool.waiting(run_dir):  # the version belongs to a run that MLflow may not know yet
            spool.sync(run_dir, uri)
        folder = run_dir / request.folder
        digest = hashlib.sha256((folder / "certificate.json").read_bytes()).hexdigest()
        run_id = _run(client, request, digest)
        version = _find(client, request, run_id, digest) or _create(client, request, folder, run_id, digest)
        crowned = champion.crown(client, request.name, str(version.version), request.headline)
    return Published(request.name, str(version.version), f"models:/{request.name}/{version.version}", crowned)


def _run(client: "MlflowClient", request: Request, digest: str) -> str:
    """MLflow's id of the request's run; a run of its own if it has none."""
    experiment = store.experiment_id(client, request.experiment)
    run_id = records.find_run(client, experiment, request.run_id or records.PENDING + digest)
    if run_id is None and request.run_id:
        raise UserError(f"MLflow has no run {request.run_id}; send its spool first, or publish with run_id=None")
    if run_id is None:
        tags = {records.KEY: digest}
        run_id = str(client.create_run(experiment, tags=tags, run_name=request.name).info.run_id)
        client.set_terminated(run_id)
    return run_id


def _find(client: "MlflowClient", request: Request, run_id: str, digest: str) -> "ModelVersion | None":
    """The version that this publication has made already."""

    def same(v: "ModelVersion") -> bool:
        trial = request.tags.get(TRIAL)
        return (v.run_id == run_id and v.tags.get(DIGEST) == digest) or (
            trial is not None and v.tags.get(TRIAL) == trial
        )

    versions = store.every(client.search_model_versions, filter_string=f"name = '{request.name}'")
    return next((v for v in versions if same(v)), None)


def _create(client: "MlflowClient", request: Request, folder: Path, run_id: str, digest: str) -> "ModelVersion":
    """Log the model, then register it in one step with its tags: no version is ever without them."""
    from mlflow.exceptions import MlflowException

    model_id = package.log_model(
        client,
        folder,
        name=request.name,
        loader_module=request.loader_module,
        tags=request.tags | {DIGEST: digest},
        metrics=request.metrics,
        run_id=run_id,
    )
    try:
        client.create_registered_model(request.name)
    except MlflowException as error:
        if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS":
            raise
    with store.as_global(client.tracking_uri):
        return client.create_model_version(
            request.name,
            source=f"models:/{model_id}",
            run_id=run_id,
            model_id=model_id,
            tags=request.tags | {DIGEST: digest, "headline": request.headline},
            description=shorten(request.description),
        )


def shorten(description: str) -> str:
    rest = "\n\n... (the whole card is in the file card.md)"
    return description if len(description) <= MAX_DESCRIPTION else description[: MAX_DESCRIPTION - len(rest)] + rest
