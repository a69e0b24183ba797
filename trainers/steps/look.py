"""A look at what is proved while a model trains: the certify stage glances at a few images, by which a search judges.

The images are the last of the test set, apart from the first ones that are reported in the end (trainers/job/recipe.py
sees to that).
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from certify.stage.glance import glance
from shards import eval_loader
from trainers.engine.engine import Engine
from trainers.job.job import Job, certify_settings
from trainers.weights import handover
from trainers.weights.ema import Average

BATCH = 8  # images at once: the time is looked at in between


def proved(job: Job, engine: Engine, average: Average | None, epoch: int) -> dict[str, float]:
    """Collective, after an epoch (from 0): {"certified_acc.EPS", "pgd_acc.EPS", "certified_images"} on rank 0, nothing
    on the others, which go on and meet it at the next exchange. Nothing either where nothing was asked for."""
    looked_at = images_of(job)
    if not looked_at or (epoch + 1) % job.train.certify_every:
        return {}
    model = handover.trained(job, engine, average)
    if model is None:
        return {}
    settings = certify_settings(job)
    radii = job.train.certify_eps or [settings.headline]
    settings = replace(settings, eps=tuple(radii), headline_eps=radii[0])
    return glance(model.eval(), last_images(job, looked_at), settings, job.train.certify_seconds)


def images_of(job: Job) -> int:
    """How many are looked at."""
    if job.test_set is None or not job.config["certify"]["enabled"]:
        return 0
    return min(job.train.certify_images, job.test_set.samples)


def last_images(job: Job, count: int) -> Iterator[tuple[list[str], Tensor, Tensor]]:
    """(keys, images_BCHW, labels_B)."""
    assert job.test_set is not None, "callers ask only where there are test shards"
    return iter(eval_loader(job.test_set, job.data, batch_size=BATCH, first=job.test_set.samples - count))
