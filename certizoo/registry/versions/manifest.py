"""The digests that bind a version's files: `files.json` holds that of each file, a tag that of files.json.

They are checked at every use of a version: after a download, in the cache, and by MLflow's own loader.
"""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from certizoo import UserError
from certizoo.commit import code_sha256, git_commit
from certizoo.documents import read_json, read_yaml
from certizoo.files import sha256
from certizoo.registry.server import store
from certizoo.text import plain

logger = logging.getLogger(__name__)
FILE = "files.json"
TAG, CODE = "files_sha256", "code_sha256"
CERTIFICATE, DIGEST = "certificate.json", "certificate_sha256"
WEIGHTS = "model.safetensors"


def write(folder: Path) -> dict[str, str]:
    """Add files.json to the files of a version and return the tags that bind them."""
    code = {"sha256": code_sha256(), "git_commit": git_commit()}
    said = {"files": {name: sha256(path) for name, path in _files(folder).items()}, "code": code}
    (folder / FILE).write_text(json.dumps(said, indent=1))
    return {TAG: sha256(folder / FILE), CODE: code["sha256"], DIGEST: sha256(folder / CERTIFICATE)}


def verify(folder: Path, tags: Mapping[str, str], what: str) -> None:
    """Raise UserError unless the files in `folder` are those that the tags of `what` bind."""
    if TAG not in tags:
        raise UserError(f"{what} has no tag {TAG}, so nothing binds its files; publish its run again")
    _same_digest(folder, FILE, tags[TAG], what)
    _as_listed(folder, what)


def verify_loaded(folder: Path) -> None:
    """Check the files of a version as MLflow has fetched them; warn if other code published them.

    The tags are those of the logged model, if the registry of this process knows it.
    """
    what = str(folder)
    tags = _tags_of(folder)
    if tags is not None:
        verify(folder, tags, what)
    else:
        _as_listed(folder, what)
        logger.warning("%s is unknown to this registry; its files agree with their own list only", what)
    _say_other_code(folder)


def _as_listed(folder: Path, what: str) -> None:
    listed: Any = read_json(folder / FILE)
    digests = listed.get("files") if isinstance(listed, dict) else None
    if not isinstance(digests, dict) or not isinstance(listed.get("code"), dict):
        raise UserError(f"{folder / FILE} is not a list of files; remove {folder} and fetch the version again")
    for name in sorted({*digests, *_files(folder)}):
        _same_digest(folder, name, digests.get(name), what)


def _same_digest(folder: Path, name: str, wanted: str | None, what: str) -> None:
    path = folder / name
    if wanted is None or not path.is_file() or path.is_symlink() or sha256(path) != wanted:
        raise UserError(
            f"{path} is not what was published as {what}; remove {folder} and fetch it again; if that does not "
            "help, the store holds other files: publish the version again"
        )


def _files(folder: Path) -> dict[str, Path]:
    """Return all files but the list itself, by their names relative to the folder."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if not path.is_dir()}
    return {name: path for name, path in found.items() if name != FILE}


def _tags_of(folder: Path) -> dict[str, str] | None:
    """Return the tags of the logged model that the fetched files name; None if no registry here knows it."""
    import mlflow
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    uri, described = store.resolve_uri(mlflow.get_tracking_uri()), folder.parents[1] / "MLmodel"
    if not described.is_file() or (uri.startswith(store.SQLITE) and not store.database(uri).is_file()):
        return None
    model_id = str(read_yaml(described).get("model_id"))
    if not re.fullmatch(r"m-[0-9a-f]{1,64}", model_id):
        return None
    try:
        return dict(MlflowClient(tracking_uri=uri).get_logged_model(model_id).tags)
    except MlflowException as error:
        logger.warning("%s: its tags cannot be looked up (%s)", folder, plain(store.reason(error)))
        return None


def _say_other_code(folder: Path) -> None:
    made = read_json(folder / FILE)["code"]
    if made.get("sha256") != code_sha256():
        commit = plain(str(made.get("git_commit")))[:40]
        logger.warning("%s was published by other code (commit %s) than serves it (%s)", folder, commit, git_commit())
