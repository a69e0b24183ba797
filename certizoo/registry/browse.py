"""Browse and fetch published versions. Nothing that comes from the registry is executed or unpickled."""

import logging
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from certizoo import UserError
from certizoo.files import cache_folder, disk_errors
from certizoo.nearest import choices, unknown
from certizoo.registry.server import store
from certizoo.registry.versions import champion, manifest, package
from certizoo.text import plain

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)
PROXIED = "mlflow-artifacts:/"
PAGE = 100  # versions in one answer of the server
REFERENCE = re.compile(
    r"(?:models:/)?(?P<name>[^@/]+)(?:@(?P<alias>[^@/]+)|/(?P<number>[0-9]{1,9}))?", re.ASCII
)  # of a version, as people write it
Aliases = Mapping[str, Mapping[str, str]]  # model -> alias -> version


@dataclass(frozen=True)
class Version:
    """A registered model version. `tags` hold the figures of its certificate as text."""

    name: str
    version: str
    aliases: tuple[str, ...]
    tags: dict[str, str]
    description: str
    run_id: str | None
    created: datetime

    @property
    def uri(self) -> str:
        return f"models:/{self.name}/{self.version}"


def versions(name: str | None = None, uri: str | None = None) -> list[Version]:
    """Return all versions of the model `name`, or of every model; newest version first within a model."""
    target = existing(uri)
    with store.one_line(target):
        client = store.connect(target)
        aliases = aliases_of(client, name, target)
        newest = "version_number DESC"
        return [v for model in aliases for v in search(client, aliases, store.query(model), newest, 100 * PAGE)]


def promote(reference: str, alias: str, uri: str | None = None, *, force: bool = False) -> Version:
    """Give the version the alias.

    Aliases of champions follow the rule of certizoo/registry/versions/champion.py. `force` overrides the rule until
    the next promotion.
    """
    target = existing(uri)
    version = find(reference, target)
    own = (champion.CHAMPION, champion.dataset_alias(version.tags.get("dataset", "")))
    if alias.startswith(champion.CHAMPION) and alias not in own:
        raise UserError(f"{alias} belongs to another dataset; {version.uri} can be {' or '.join(own)}")
    with store.one_line(target):
        client = store.connect(target)
        if alias in own:
            _promote_champion(client, version, force)
        else:
            store.put(client.set_registered_model_alias, version.name, alias, version.version)
    return find(version.uri, target)


def _promote_champion(client: "MlflowClient", version: Version, force: bool) -> None:
    against = champion.against_rule(client, version.name, version.version)
    if against and not force:
        raise UserError(
            f"{version.uri} is not the champion by the rule: {against}; add --force to promote it nevertheless"
        )
    if against:
        logger.warning("%s is champion against the rule: %s", plain(version.uri), plain(against))
    champion.promote(client, version.name, version.version)


def pull(reference: str, to: Path, uri: str | None = None) -> Path:
    """Copy the published files of a version into the folder `to`, which must be new or empty: all of them, or none."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} is not empty; give a new folder")
    source = download(reference, uri)
    to.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors("free some space, then pull again"), tempfile.TemporaryDirectory(dir=to.parent) as scratch:
        shutil.copytree(source, Path(scratch) / "whole")
        (Path(scratch) / "whole").rename(to)  # os.rename accepts an empty target folder
    return to


def find(reference: str, uri: str | None = None) -> Version:
    """Return the version named by `name@alias`, `name/3`, or `name` (its champion), with or without `models:/`."""
    match = REFERENCE.fullmatch(reference)
    if match is None:
        raise UserError(f"{reference!r} is not a model version; write NAME@ALIAS or NAME/VERSION")
    name, number, alias = match["name"], match["number"], match["alias"] or champion.CHAMPION
    target = existing(uri)
    with store.one_line(target):
        client = store.connect(target)
        look_up, key = (client.get_model_version, number) if number else (client.get_model_version_by_alias, alias)
        if found := store.found(look_up, name, key):
            return _version(found, dict.fromkeys(found.aliases, str(found.version)))
        aliases = aliases_of(client, name, target)
        newest = islice(search(client, aliases, store.query(name), "version_number DESC"), PAGE)
        have = [word for v in newest for word in (f"{name}/{v.version}", *(f"{name}@{a}" for a in v.aliases))]
    raise unknown("version", reference, have, f"certizoo registry list {name}")


def download(reference: str, uri: str | None = None) -> Path:
    """Return a local folder with the published files of a version, checked against its tags at every call.

    The folder lies in the cache (CERTIZOO_CACHE, by default ~/.cache/certizoo), one per logged model.

    Args:
        reference: as in `find`.

    Raises:
        UserError: the files are not those that were published.
    """
    target = existing(uri)
    version = find(reference, target)
    with store.one_line(target):
        client = store.connect(target)
        registered = client.get_model_version(version.name, version.version)
        model_id = logged_model_id(registered)
        if model_id is None:
            raise UserError(f"{version.uri} was not published by this project: it has no logged model")
        kept = cache() / model_id
        if not kept.is_dir():
            _fetch(_source(client.get_logged_model(model_id).artifact_location, target), kept, version, target)
    manifest.verify(kept, version.tags, version.uri)
    return kept


def _fetch(source: str, to: Path, version: Version, target: str) -> None:
    """Fetch the files; a copy that differs from the publication does not enter the cache."""
    from mlflow.artifacts import download_artifacts

    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as scratch:
        got = Path(download_artifacts(source, dst_path=scratch, tracking_uri=target, registry_uri=target))
        manifest.verify(got, version.tags, version.uri)
        try:
            got.rename(to)
        except OSError:
            if not to.is_dir():  # otherwise another process was faster
                raise


def logged_model_id(registered: "ModelVersion") -> str | None:
    """Return the id of the logged model behind one of our versions; its `.model_id` is lost over HTTP."""
    model_id = str(registered.source or "").removeprefix("models:/")
    return model_id if re.fullmatch(r"m-[0-9a-f]{1,64}", model_id) else None  # it names a folder of the cache


def cache() -> Path:
    """Return the folder of pulled versions: CERTIZOO_CACHE, else the user's cache."""
    return cache_folder("models")


def _source(location: str, uri: str) -> str:
    """Return the location of the published files, given that of the logged model."""
    root = store.artifact_root(uri)
    if root and location.startswith(PROXIED):  # written through a server, read from its store directly
        location = (root / location.removeprefix(PROXIED).lstrip("/")).as_uri()
    return f"{location.rstrip('/')}/{package.LOCATION}"


def existing(uri: str | None) -> str:
    """Return the URI; raise an error, instead of creating a database, if there is none."""
    target = store.resolve_uri(uri)
    store.use_defaults()
    if target.startswith(store.SQLITE) and not store.database(target).is_file():
        raise UserError(
            f"no registry at {store.database(target)} yet; publish a model first (`make demo`), or set "
            "MLFLOW_TRACKING_URI to that of another registry"
        )
    return target


def aliases_of(client: "MlflowClient", name: str | None, target: str) -> Aliases:
    """Return the aliases of the model `name`, or of every model."""

    def every(query: str | None) -> Aliases:
        found = store.every(client.search_registered_models, filter_string=query)
        return {model.name: {alias: str(number) for alias, number in model.aliases.items()} for model in found}

    found = every(name and store.query(name))
    if name is not None and name not in found:
        where = f"no model {name!r} in {store.public(target)}"
        raise UserError(f"{where}; {choices(name, every(None), 'certizoo registry list')}")
    return found


def search(client: "MlflowClient", aliases: Aliases, query: str, order: str, page: int = PAGE) -> Iterator[Version]:
    """Iterate over the versions that meet a query of `store.query`, a page at a time."""
    by = {"filter_string": query, "order_by": [order], "max_results": page}
    return known(store.every(client.search_model_versions, **by), aliases)


def known(found: Iterable["ModelVersion"], aliases: Aliases) -> Iterator[Version]:
    return (_version(v, aliases[v.name]) for v in found if v.name in aliases)


def _version(v: "ModelVersion", aliases: Mapping[str, str]) -> Version:
    return Version(
        name=v.name,
        version=str(v.version),
        aliases=tuple(sorted(alias for alias, number in aliases.items() if number == str(v.version))),
        tags=dict(v.tags),
        description=v.description or "",
        run_id=v.run_id,
        created=datetime.fromtimestamp(v.creation_timestamp / 1000, UTC),
    )
