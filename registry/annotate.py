"""Say more of a version that is registered already: what was measured of it later."""

from collections.abc import Mapping

from registry import browse, records, store
from registry.browse import Version


def annotate(reference: str, tags: Mapping[str, str], metrics: Mapping[str, float], uri: str | None = None) -> Version:
    """Add tags to a version, and metrics to the run and the logged model behind it; others stay as they are.

    reference: as in `browse.find`. Raises UserError where there is no such version or MLflow is away.
    """
    target = store.resolve_uri(uri)
    version = browse.find(reference, target)
    with store.one_line(target):
        client = store.connect(target)
        for key, value in tags.items():
            client.set_model_version_tag(version.name, version.version, key, value)
        registered = client.get_model_version(version.name, version.version)
        if registered.run_id and metrics:
            rows = [[name, value, records.now(), 0] for name, value in metrics.items()]
            records.log_rows(client, registered.run_id, rows, browse.logged_model_id(registered))
    return browse.find(version.uri, target)
