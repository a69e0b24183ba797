"""Say more of a version that is registered already: what was measured of it later."""

import logging
from collections.abc import Mapping

from certizoo import UserError
from certizoo.text import plain
from registry import browse, records, store, version_tags
from registry.browse import Version

logger = logging.getLogger(__name__)


def annotate(
    reference: str, tags: Mapping[str, str], metrics: Mapping[str, float], weights_sha256: str, uri: str | None = None
) -> Version:
    """Add what was measured of the weights to a version of these weights, and metrics to the run and the logged model
    behind it; what its certificate says stays.

    reference: as in `browse.find`. Raises UserError where there is no such version, where it has other weights, and
    where MLflow is away.
    """
    target = store.resolve_uri(uri)
    version = browse.find(reference, target)
    _check(version, tags, weights_sha256)
    with store.one_line(target):
        client = store.connect(target)
        for key, value in tags.items():
            client.set_model_version_tag(version.name, version.version, key, value)
        registered = client.get_model_version(version.name, version.version)
        if registered.run_id and metrics:
            rows = [[name, value, records.now(), 0] for name, value in metrics.items()]
            records.log_rows(client, registered.run_id, rows, browse.logged_model_id(registered))
    return browse.find(version.uri, target)


def _check(version: Version, tags: Mapping[str, str], weights_sha256: str) -> None:
    own = version.tags.get(version_tags.WEIGHTS)
    if own is None:
        logger.warning("%s is of earlier code: nothing says of which weights it is", plain(version.uri))
    elif own != weights_sha256:
        raise UserError(
            f"{version.uri} has weights {own[:16]}, and others were measured, {weights_sha256[:16]}: nothing written"
        )
    if wrong := [key for key in tags if not version_tags.of_evaluation(key)]:
        raise UserError(f"{wrong[0]} is not for an evaluation to write; of {version.uri} its certificate says it")
