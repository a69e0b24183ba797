"""Certify a few test images while a model trains, so that a search can compare trials before they end.

The images are the last ones of the test set. They never overlap the first ones, which the final certificate reports
(`probes_exclude_reported_images` in trainers/job/compatibility.py).
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from certify.stage.probe_model import certify_probe
from certizoo.shards import eval_loader
from trainers.engine.engine import Engine
from trainers.job.job import Job, certify_settings
from trainers.weights import handover
from trainers.weights.ema import Average

BATCH = 8  # images certified together; the time limit is checked between batches


def probe(job: Job, engine: Engine, average: Average | None, epoch: int) -> dict[str, float]:
    """Return {"certified_acc.EPS", "certified_near.EPS", "pgd_acc.EPS", "certified_images"} after epoch 0, 1, ...

    Collective. Ranks other than 0 return {} and wait for rank 0 at the next collective operation. Rank 0 also returns
    {} if no probe is due.
    """
    count = probe_images(job)
    if not count or (epoch + 1) % job.train.certify_every:
        return {}
    model = handover.trained(job, engine, average)
    if model is None:
        return {}
    settings = certify_settings(job)
    radii = job.train.certify_eps or [settings.headline]
    settings = replace(settings, eps=tuple(radii), headline_eps=radii[0])
    return certify_probe(model.eval(), last_images(job, count), settings, job.train.certify_seconds)


def probe_images(job: Job) -> int:
    """Return the number of images to certify; 0 without test shards or with `certify.enabled=false`."""
    if job.test_set is None or not job.config["certify"]["enabled"]:
        return 0
    return min(job.train.certify_images, job.test_set.samples)


def last_images(job: Job, count: int) -> Iterator[tuple[list[str], Tensor, Tensor]]:
    """Iterate over (keys, images_BCHW, labels_B) of the last `count` test images."""
    assert job.test_set is not None, "callers ask only where there are test shards"
    return iter(eval_loader(job.test_set, job.data, batch_size=BATCH, first=job.test_set.samples - count))
