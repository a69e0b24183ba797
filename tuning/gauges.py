"""Prometheus gauges of running trials, served by Ray's agents on the nodes (cluster/README.md).

    ray_certizoo_images_per_s      training, attack included
    ray_certizoo_loader_wait       share of the time in which the step waited for images
    ray_certizoo_clean_acc, ray_certizoo_pgd_acc, ray_certizoo_certified_acc      of the trainer's test images; by `eps`

Each has the labels `search`, `trial` and `eps` ('' if there is none).
"""

from collections.abc import Mapping
from functools import cache

from ray.util.metrics import Gauge

TITLES = {
    "images_per_s": "training images per second of a trial",
    "loader_wait": "share of a trial's time in which its step waits for images",
    "clean_acc": "accuracy of a trial on test images",
    "pgd_acc": "accuracy of a trial under attack, with eps that of the certificate",
    "certified_acc": "certified accuracy of a trial",
}
LABELS = ("search", "trial", "eps")


def show(search: str, trial: str, row: Mapping[str, float]) -> None:
    """Set the gauges from a row of the trainer's metrics, where accuracies at a radius are called NAME.EPS."""
    for key, value in row.items():
        name, _, eps = key.partition(".")
        if name in TITLES:
            _gauge(name).set(float(value), tags=dict(zip(LABELS, (search, trial, eps), strict=True)))


@cache
def _gauge(name: str) -> Gauge:
    return Gauge(f"certizoo_{name}", description=TITLES[name], tag_keys=LABELS)
