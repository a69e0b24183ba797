"""From a finished certificate to a version in the registry."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from certify.rows.records import require_rows
from certify.stage import tables
from certify.stage.run import CARD, CERTIFICATE, TABLE
from certizoo import UserError
from certizoo.locks import HOLDER, LOCK
from registry.publish import publish as publish_version


def publish(
    handover: Path,
    out: Path,
    *,
    registered_name: str,
    run_id: str | None,
    experiment: str,
    uri: str | None = None,
    tags: Mapping[str, object] = MappingProxyType({}),
) -> str:
    """Register the certified hand-over as a model version; returns a line that says where, or where it waits.

    `tags` join those of the certificate, which win.

    The version holds the hand-over's files and those of `out`, collected in `published/` beside `out`.
    """
    folder = _collect([handover, out], out.parent / "published")
    summary = require_rows(folder / CERTIFICATE, TABLE)
    if not summary:
        raise UserError(f"{out} holds no {CERTIFICATE}: what is not certified is not published; certify it first")
    version = publish_version(
        folder,
        name=registered_name,
        loader_module="certify.served",
        tags={**tags, **tables.tags(summary)},
        description=(folder / CARD).read_text(),
        metrics=tables.metrics(summary),
        run_id=run_id,
        experiment=experiment,
        headline=f"certified_acc.{summary['headline_eps']:g}",
        uri=uri,
    )
    if version.version is None:
        return f"not yet: MLflow is away; {version.uri} waits for `python -m registry sync {out.parent}`"
    return f"{version.name} version {version.version}" + (" (champion)" if version.champion else "")


def _collect(folders: list[Path], to: Path) -> Path:
    """The files of several folders in one; linked where the file system can, so that weights are not kept twice."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    for path in (path for folder in folders for path in folder.iterdir() if path.name not in (LOCK, HOLDER)):
        try:
            os.link(path.resolve(), to / path.name)
        except OSError:
            shutil.copyfile(path, to / path.name)
    return to
