"""A look at what is proved while a model trains: the certify stage on a few images, which a search judges by.

The images are the last of the test set, apart from the first ones that are reported in the end (trainers/job/recipe.py
sees to that). Figures of so few images are for choosing; none of them enters a certificate.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

import pandas as pd
import torch
from torch import Tensor, nn

import zoo
from certify.stage.outcomes import evaluate
from certify.stage.settings import Settings
from shards import eval_loader
from trainers.engine.engine import Engine
from trainers.job.job import Job, certify_settings
from trainers.weights.ema import Average

BATCH = 8  # images at once: the time is looked at in between


def proved(job: Job, engine: Engine, average: Average | None) -> dict[str, float]:
    """Collective: {"certified_acc.EPS", "pgd_acc.EPS", "certified_images"} on rank 0, nothing on the others, which go
    on and meet it at the next exchange. Nothing either where nothing was asked for."""
    if not (looked_at := images_of(job)):
        return {}
    state = average.module.state_dict() if average else engine.whole_state()
    if engine.world.rank:
        return {}
    with torch.random.fork_rng([]):  # its first weights are drawn
        model = zoo.create_model(**job.model)
    model.load_state_dict(state)
    settings = certify_settings(job)
    if job.train.certify_eps is not None:
        settings = replace(settings, eps=tuple(job.train.certify_eps), headline_eps=job.train.certify_eps[0])
    else:
        settings = replace(settings, eps=(settings.headline,))
    return figures(model.eval(), last_images(job, looked_at), settings, job.train.certify_seconds)


def images_of(job: Job) -> int:
    """How many are looked at."""
    if job.test_set is None or not job.config["certify"]["enabled"]:
        return 0
    return min(job.train.certify_images, job.test_set.samples)


def last_images(job: Job, count: int) -> Iterator[tuple[list[str], Tensor, Tensor]]:
    """(keys, images_BCHW, labels_B)."""
    assert job.test_set is not None, "callers ask only where there are test shards"
    return iter(eval_loader(job.test_set, job.data, batch_size=BATCH, first=job.test_set.samples - count))


def figures(
    model: nn.Module, batches: Iterator[tuple[list[str], Tensor, Tensor]], asked: Settings, seconds: float
) -> dict[str, float]:
    """Shares of the images that were reached in time, at least those of one batch."""
    end, rows = time.monotonic() + seconds, list[pd.DataFrame]()
    for keys, images_BCHW, labels_B in batches:
        rows.append(
            evaluate(
                model, images_BCHW, labels_B, eps=asked.grid, method=asked.method, attack=asked.attack, keys=keys,
                nonce=asked.nonce, norm=asked.norm,
            )
        )  # fmt: skip
        if time.monotonic() > end:
            break
    found = pd.concat(rows)
    shares = {"certified_images": float(len(found))}
    for eps in asked.grid:
        shares[f"certified_acc.{eps:g}"] = float((found[f"certified.{eps:g}"] == "certified").mean())
        shares[f"pgd_acc.{eps:g}"] = float(found[f"pgd.{eps:g}"].mean())
    return shares
