"""Publish a finished run as a registered model version, always with its certificate.

The certificate's figures become the version's tags and the metrics of the logged model behind it. The files are sent
first; the version is created last, in one step, with all its tags. The request, publish.json, lies in the run folder
from before the first step until after the last. `sync` therefore completes an interrupted publication, and only once.
"""

import json
import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from certizoo import UserError
from certizoo.config.schema import checked
from certizoo.documents import read_json
from certizoo.files import disk_errors, sha256, write_whole
from certizoo.locks import locked
from certizoo.registry.server import store
from certizoo.registry.tracking import checks, run_folder, runs
from certizoo.registry.tracking.run_folder import PUBLICATION
from certizoo.registry.versions import champion, manifest, package, version_tags

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)
LOCK = ".publish.lock"
DIGEST = manifest.DIGEST  # tag: with the run's id, it identifies a version
TRIAL = "trial"  # tag: a trial of a search has one version, however often it was restarted and sent
SEARCH = "search_id"  # tag: searches on other machines, or of other days, may have the same name
MAX_DESCRIPTION = 5000  # characters, the width of MLflow's column
MAX_CARD = 10**6


@dataclass(frozen=True)
class Published:
    """A registered version, and `why` it is not the champion.

    `version` is None while the publication waits in the file `uri`.
    """

    name: str
    version: str | None
    uri: str
    champion: bool
    why: str = ""


@dataclass(frozen=True)
class Request:
    """Everything that a publication needs, besides its files: the content of publish.json."""

    folder: str
    name: str
    tags: dict[str, str]
    description: str
    metrics: dict[str, float]
    experiment: str
    headline: str
    uri: str


def publish(
    folder: Path,
    *,
    name: str,
    tags: Mapping[str, object],
    description: str,
    metrics: Mapping[str, float],
    experiment: str,
    headline: str,
    uri: str | None = None,
    run_dir: Path | None = None,
) -> Published:
    """Register the files of `folder` as the next version of `name`; the same certificate of a run only once.

    The version belongs to the run that was tracked in `run_dir`, else to one that is created for it.

    Args:
        folder: the hand-over, with its certificate.
        name: of the registered model.
        tags: figures of the certificate; must hold `dataset` and the tag named by `headline`, the accuracy in
            [0, 1] that the alias `champion` goes by.
        description: the model card, Markdown.
        run_dir: the run folder, where the publication waits if MLflow does not answer; by default the parent of
            `folder`.

    Raises:
        UserError: `folder` has no readable `certificate.json`.
    """
    run_dir = Path(run_dir or Path(folder).absolute().parent)
    request = Request(
        folder=os.path.relpath(Path(folder).resolve(), run_dir.resolve()),  # a run folder may be moved
        name=name,
        tags={runs.clean_name(key): str(value) for key, value in tags.items()},
        description=description,
        metrics={key: float(value) for key, value in metrics.items()},
        experiment=experiment,
        headline=runs.clean_name(headline),
        uri=store.public(store.resolve_uri(uri)),
    )
    check(request, run_dir)
    target = store.resolve_uri(uri)
    with locked(run_dir / LOCK):
        _send_another_first(run_dir, request.name, target)
        with disk_errors("free some space, then publish again"):
            write_whole(run_dir / PUBLICATION, json.dumps(asdict(request)))
        try:
            return _finish(request, run_dir, target)
        except store.Away as away:
            waits = run_dir / PUBLICATION
            logger.warning("%s. %s is kept; publish it with `certizoo registry sync %s`", away, waits, run_dir)
            return Published(name, None, str(waits), champion=False)
        except store.Full:  # repeating the command, or `sync`, completes it
            raise
        except UserError:
            (run_dir / PUBLICATION).unlink()
            raise


def sync(run_dir: Path, uri: str | None = None) -> Published | None:
    """Perform the publication that waits in a run folder; return None if none waits."""
    if (request := waiting(run_dir)) is None:
        return None
    target = store.agreed_uri(uri, request.uri, run_dir)
    with locked(run_dir / LOCK):
        if not waiting(run_dir):  # another process has performed it meanwhile
            return None
        check(request, run_dir)
        return _finish(request, run_dir, target)


def keep_one_a_trial(search: str, uri: str) -> None:
    """Delete all but the first version of every trial of a search that has ended.

    A second one is left by a worker that is killed after it has registered a version, while the next one does the same.
    """
    store.use_defaults()
    of_trial = defaultdict[tuple[str, str], list["ModelVersion"]](list)
    with store.one_line(uri):
        client = store.connect(uri)
        query = store.query(equal={SEARCH: search})
        for version in store.every(client.search_model_versions, filter_string=query):
            if version.tags.get(SEARCH) == search and TRIAL in version.tags:
                of_trial[version.name, version.tags[TRIAL]].append(version)
        for made in of_trial.values():
            _first(client, made)


def waiting(run_dir: Path) -> Request | None:
    """Return the request that waits in a run folder, which may come from someone else.

    Raises UserError if it is invalid.
    """
    path = run_dir / PUBLICATION
    run_folder.refuse_links(run_dir, PUBLICATION, f"{PUBLICATION}.part")
    if not path.is_file():
        return None
    try:
        request = Request(**checks.mapping(read_json(path), "the content"))
        for name in ("folder", "name", "experiment", "headline", "uri"):
            checks.text(getattr(request, name), name)
        checks.text(request.description, "description", MAX_CARD)
        for name, tag in checks.mapping(request.tags, "tags").items():
            checks.text(tag, f"tags.{name}", MAX_CARD)
        for name, value in checks.mapping(request.metrics, "metrics").items():
            checks.number(value, f"metrics.{name}")
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{path} is not a valid publication ({error}); remove it and publish again") from None
    return request


def check(request: Request, run_dir: Path) -> None:
    """Refuse what must not be registered, before anything is sent."""
    try:
        certificate = checks.inside(run_dir, request.folder) / manifest.CERTIFICATE
    except ValueError as error:
        raise UserError(f"{run_dir} has nothing to publish: {error}") from None
    if not certificate.is_file():
        raise UserError(f"{certificate} is missing, and only certified runs are published; certify the run first")
    said = read_json(certificate)
    weights = certificate.with_name(manifest.WEIGHTS)
    if not isinstance(said, dict) or not weights.is_file() or said.get(version_tags.WEIGHTS) != sha256(weights):
        raise UserError(f"{certificate} does not belong to the weights beside it; certify them again")
    checked("registered model name", request.name, checks.ModelName)
    checked("experiment", request.experiment, checks.ExperimentName)
    for tag in ("dataset", request.headline):
        if tag not in request.tags:
            raise UserError(f"tag {tag!r} is missing from the publication of {request.name}; add it to tags")
    if (wrong := version_tags.contradiction(request.tags, said)) is not None:
        raise UserError(f"{run_dir / request.folder} is not published because its tag {wrong}; certify it again")


def _send_another_first(run_dir: Path, name: str, uri: str) -> None:
    """Send a waiting publication under another name first: the next replaces it in the folder."""
    if (earlier := waiting(run_dir)) and earlier.name != name:
        try:
            check(earlier, run_dir)
            _finish(earlier, run_dir, uri)
        except (store.Away, store.Full):
            raise
        except UserError as refused:  # forever: it would block all later ones
            logger.warning("%s is dropped: %s", run_dir / PUBLICATION, refused)


def _finish(request: Request, run_dir: Path, uri: str) -> Published:
    published = _send(request, run_dir, uri)
    (run_dir / PUBLICATION).unlink()
    return published


def _send(request: Request, run_dir: Path, uri: str) -> Published:
    store.use_defaults()
    with store.one_line(uri):
        client = store.connect(uri)
        folder = run_dir / request.folder
        digest = sha256(folder / manifest.CERTIFICATE)
        run_id = runs.sync(run_dir, uri) or _own_run(client, request, digest)
        version = _find(client, request, run_id, digest) or _create(client, request, folder, run_id, digest)
        standing = champion.elect_champion(client, request.name, str(version.version))
    if not standing.is_champion:
        logger.info("%s/%s is not the champion: %s", request.name, version.version, standing.why)
    return Published(
        request.name,
        str(version.version),
        f"models:/{request.name}/{version.version}",
        standing.is_champion,
        standing.why,
    )


def _own_run(client: "MlflowClient", request: Request, digest: str) -> str:
    """Return MLflow's id of the run of a certificate that belongs to no training."""
    run_id = runs.create_run(client, store.experiment_id(client, request.experiment), digest, request.name)
    client.set_terminated(run_id)
    return run_id


def _find(client: "MlflowClient", request: Request, run_id: str, digest: str) -> "ModelVersion | None":
    """Return the version that this publication has already made.

    Two writers may each have made one, on different machines or because MLflow's client repeated a request. The first
    stays and the others are deleted.
    """
    if TRIAL in request.tags:
        own = {tag: request.tags[tag] for tag in (TRIAL, SEARCH) if tag in request.tags}
        query = store.query(request.name, own)
    else:
        own = {DIGEST: digest}
        query = store.query(request.name, {}, f"run_id = '{run_id}'")
    versions = store.every(client.search_model_versions, filter_string=query)
    made = [v for v in versions if own.items() <= v.tags.items()]
    return _first(client, made) if made else None


def _first(client: "MlflowClient", made: Sequence["ModelVersion"]) -> "ModelVersion":
    """Return the first of some versions of one model, and delete the others."""
    first, *others = sorted(made, key=lambda version: int(version.version))
    for other in others:
        _delete(client, other)
    return first


def _delete(client: "MlflowClient", version: "ModelVersion") -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.delete_model_version(version.name, version.version)
    except MlflowException as error:
        if not store.is_refusal(error):
            raise  # otherwise the other writer was faster


def _create(client: "MlflowClient", request: Request, folder: Path, run_id: str, digest: str) -> "ModelVersion":
    """Log the model, then register it in one step with its tags: no version is ever without them."""
    with package.staged(folder) as (files, binding):
        tags = request.tags | binding | {"headline": request.headline}
        model_id = package.log_model(
            client,
            files,
            name=request.name,
            tags=tags,
            metrics=request.metrics,
            run_id=run_id,
        )
    register = partial(
        client.create_model_version,
        request.name,
        source=f"models:/{model_id}",
        run_id=run_id,
        model_id=model_id,
        tags=tags,
        description=shorten(request.description),
    )
    with store.as_global(client.tracking_uri):
        made = store.found(register)
        if made is None:  # the first version. To look before costs a walk over all versions of the model
            store.found(client.create_registered_model, request.name)
            made = register()
    return _find(client, request, run_id, digest) or made


def shorten(description: str) -> str:
    """Return the model card, cut to MLflow's limit for descriptions."""
    rest = "\n\n... (the whole card is in the file card.md)"
    return description if len(description) <= MAX_DESCRIPTION else description[: MAX_DESCRIPTION - len(rest)] + rest
