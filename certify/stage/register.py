"""Publication of a finished certificate as a version in the registry."""

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
from certizoo.registry.server import credentials
from certizoo.registry.versions import champion, version_tags
from certizoo.registry.versions.publish import publish as publish_version


def publish(
    handover: Path,
    out: Path,
    *,
    registered_name: str,
    experiment: str,
    uri: str | None = None,
    tags: Mapping[str, object] = MappingProxyType({}),
    champion_images: int = champion.ENOUGH,
) -> str:
    """Register the certified hand-over as a model version; returns a line that says where, or where it waits.

    `tags` join those of the certificate and cannot state its facts. A champion needs at least `champion_images` images.

    The version holds the hand-over's files and those of `out`, collected in `published/` beside `out`.
    """
    champion.refuse_given(champion_images)
    version_tags.refuse_given(tags, "registry.tags")
    folder = _collect([handover, out], out.parent / "published")
    summary = require_rows(folder / CERTIFICATE, TABLE)
    if not summary:
        raise UserError(f"{out} holds no {CERTIFICATE}, and only certified models are published; certify it first")
    if summary["first"]:
        raise UserError(f"{out} covers only test images from {summary['first']} on; join the ranges with parts=")
    version = publish_version(
        folder,
        name=registered_name,
        tags={**credentials.redacted(tags), **tables.tags(summary), champion.IMAGES: champion_images},
        description=(folder / CARD).read_text(),
        metrics=tables.metrics(summary),
        experiment=experiment,
        headline=version_tags.share(version_tags.CERTIFIED, summary["norm"], f"{summary['headline_eps']:g}"),
        uri=uri,
    )
    if version.version is None:
        return f"not yet: MLflow does not answer; {version.uri} waits for `certizoo registry sync {out.parent}`"
    standing = " (champion)" if version.champion else f" (not champion: {version.why})"
    return f"{version.name} version {version.version}{standing}"


def _collect(folders: list[Path], to: Path) -> Path:
    """Collect the files of several folders in one.

    Files are linked where the file system allows it, so that weights are not stored twice.
    """
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    for folder in folders:
        for path in (path for path in folder.iterdir() if path.name not in (LOCK, HOLDER)):
            if not path.resolve().is_relative_to(folder.resolve()):
                raise UserError(
                    f"{path} is a link to outside its folder, which is not published; copy the file instead"
                )
            try:
                os.link(path.resolve(), to / path.name)
            except OSError:
                shutil.copyfile(path, to / path.name)
    return to
