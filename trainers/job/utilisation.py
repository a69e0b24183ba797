"""Model FLOPs utilisation (MFU, Chowdhery et al. 2022): the share of the peak that the model's arithmetic takes.

    MFU = passes F images/s / (ranks peak),    F = operations of the matrix products of a forward pass

A backward pass to the images or to the weights costs one forward pass, so an attack step costs 2 and an update 3.
What is computed again (checkpointing) does not count. Without a known peak, or for other objectives, there is no MFU.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from certizoo.shards.format.config import TEXT
from trainers.job.job import Job
from zoo.models.factory import input_size
from zoo.models.overview import on_meta

# Dense bf16 FLOP/s of tensor cores, by the vendor's data sheets; the first name that the device's name contains counts
PEAKS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}
UPDATE, STEP = 3, 2  # passes


def meter(job: Job, ranks: int) -> Callable[[float], dict[str, float]]:
    """Return a function from the images/s of all ranks together to {"mfu"}, or to {} if that is unknown."""
    peak, count = _peak(job), passes(job)
    if peak is None or count is None:
        return lambda images_per_s: {}
    flops = count * forward_flops(job.model)
    return lambda images_per_s: {"mfu": flops * images_per_s / (ranks * peak)}


def forward_flops(model: Mapping[str, Any]) -> int:
    """Return the operations of a forward pass for one image, as `model(x)` makes it."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        on_meta(**model)(torch.empty(1, *input_size(model), device="meta"))
    return counter.get_total_flops()


def _peak(job: Job) -> float | None:
    if job.train.precision != "bf16" or job.data.kind == TEXT or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((flops for part, flops in PEAKS.items() if part in name), None)


def passes(job: Job) -> int | None:
    """Return the forward passes whose arithmetic equals that of a training image, or None if nobody counted them."""
    attack = job.attack.restarts * job.attack.steps * STEP
    if job.attack.restarts > 1:
        attack += 1 + job.attack.restarts  # the points compared
    adversarial = {"pgd_at": attack + UPDATE, "mart": attack + 2 * UPDATE, "trades": 1 + attack + 2 * UPDATE}
    found = {"clean": UPDATE, **adversarial}.get(job.objective.name)
    return found if found is None else found * (2 if job.train.sam_rho else 1)
