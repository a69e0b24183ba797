"""Add later measurements to a registered version."""

from collections.abc import Mapping

from certizoo import UserError
from certizoo.registry import browse
from certizoo.registry.browse import Version
from certizoo.registry.server import store
from certizoo.registry.tracking import run_folder, runs
from certizoo.registry.tracking.run_folder import Point
from certizoo.registry.versions import version_tags


def annotate(reference: str, tags: Mapping[str, str], metrics: Mapping[str, float], weights_sha256: str) -> Version:
    """Add measurements of these weights to a version, and metrics to its run and logged model.

    Tags of the certificate are never changed.

    Args:
        reference: as in `browse.find`.

    Raises:
        UserError: the version does not exist, it has other weights, or MLflow does not answer.
    """
    target = store.resolve_uri()
    version = browse.find(reference, target)
    _check(version, tags, weights_sha256)
    with store.one_line(target):
        client = store.connect(target)
        for key, value in tags.items():
            store.put(client.set_model_version_tag, version.name, version.version, key, value)
        registered = client.get_model_version(version.name, version.version)
        if registered.run_id and metrics:
            points = [Point(name, value, run_folder.now(), 0) for name, value in metrics.items()]
            runs.log_points(client, registered.run_id, points, browse.logged_model_id(registered))
    return browse.find(version.uri, target)


def _check(version: Version, tags: Mapping[str, str], weights_sha256: str) -> None:
    own = version.tags.get(version_tags.WEIGHTS, "unknown")
    if own != weights_sha256:
        raise UserError(
            f"{version.uri} has weights {own[:16]}, but {weights_sha256[:16]} were measured: nothing written"
        )
    if wrong := [key for key in tags if not version_tags.of_evaluation(key)]:
        raise UserError(f"{wrong[0]} cannot be set by an evaluation; in {version.uri} it comes from the certificate")
