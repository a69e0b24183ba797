"""Estimates for a run before it starts: memory on each rank, disk, steps.

Bytes per rank of P parameters on N ranks, ZeRO stage s (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054,
section 5; k = 2 states per weight for AdamW, 1 for SGD with momentum, 0 without):

    weights     4 P            / N from s = 3         masters   4 P    / N, present from s = 1
    gradients   4 P            / N from s = 2         states    4 k P  / N from s = 1

All of them are float32, also with bf16.

Activations are measured: the bytes that autograd keeps of the objective's loss for one image and for two on this CPU,
extrapolated linearly. This is an estimate: other kernels keep other tensors, and temporary memory is not included.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from trainers.engine.wrappers import recompute_blocks_
from trainers.job.job import Job
from trainers.objectives import OBJECTIVES, Probe


@dataclass(frozen=True)
class Estimate:
    """Estimates in bytes, except for parameters and steps.

    `average` is the moving average of the weights, if it is kept; `teacher` the weights of distill.teacher, whole on
    each rank; `disk` is everything that is written.
    """

    parameters: int
    weights: int
    gradients: int
    states: int
    average: int
    teacher: int
    activations: int
    checkpoint: int
    disk: int
    steps_per_epoch: int
    total_steps: int

    @property
    def a_rank(self) -> int:
        """Return the bytes on one rank."""
        return self.weights + self.gradients + self.states + self.average + self.teacher + self.activations


def estimate(job: Job, ranks: int) -> Estimate:
    """Estimate the needs of a job on `ranks` ranks. Builds the model and runs it on two images."""
    model = zoo.create_model(**job.model)
    count = sum(parameter.numel() for parameter in model.parameters())
    stage = job.deepspeed.stage
    momenta = 4 * count * states_a_weight(job)
    optimiser = momenta + (4 * count if stage else 0)
    average = 4 * count if job.train.ema_decay else 0
    checkpoint = 4 * count + momenta + average
    return Estimate(
        parameters=count,
        weights=share(4 * count, ranks, stage >= 3),
        gradients=share(4 * count, ranks, stage >= 2),
        states=share(optimiser, ranks, stage >= 1),
        average=average,
        teacher=job.teacher.bytes if job.teacher else 0,
        activations=activations(job, model, job.train.micro_batch(ranks)),
        checkpoint=checkpoint,
        # One more checkpoint while the next is written, and the hand-over.
        disk=checkpoint * (job.train.keep_checkpoints + 1) + 4 * count,
        steps_per_epoch=job.steps_per_epoch,
        total_steps=job.total_steps,
    )


def share(size: int, ranks: int, cut: bool) -> int:
    """Return one rank's part."""
    return -(-size // ranks) if cut else size


def states_a_weight(job: Job) -> int:
    """Return k of the module docstring; for Muon that of its AdamW, an upper bound, since its matrices need half."""
    return int(job.optimizer.momentum > 0) if job.optimizer.name == "sgd" else 2


def activations(job: Job, model: nn.Module, micro_batch: int) -> int:
    """Return the bytes that autograd keeps of the loss of a micro-batch, without parameters."""
    if job.train.grad_checkpointing:
        recompute_blocks_(model)
    one, two = (saved_by_autograd(job, model, images) for images in (1, 2))
    return one + (micro_batch - 1) * (two - one)


def saved_by_autograd(job: Job, model: nn.Module, images: int) -> int:
    """Measure the bytes that autograd keeps of the objective's loss, each storage counted once.

    The images themselves stand for adversarial ones: an attack frees its passes before the loss is computed.
    """
    x_BCHW = torch.rand(images, job.model["in_chans"], job.data.img_size, job.data.img_size)
    labels_B = torch.arange(images) % job.data.num_classes
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, tuple[int, Tensor]] = {}  # keep the tensor, or its address would be reused

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    narrow: AbstractContextManager[object] = torch.autocast("cpu", torch.bfloat16, job.train.precision == "bf16")
    probe = Probe(partial(_measured, model.train()), lambda x, _: x, partial(_predicted, model), job.objective)
    with narrow, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        OBJECTIVES[job.objective.name](probe, x_BCHW, labels_B)
    return sum(size for size, _ in sizes.values())


def _measured(model: nn.Module, measure: Any, *inputs: Any) -> Any:
    return measure(model, *inputs)


@torch.no_grad()
def _predicted(model: nn.Module, images_BCHW: Tensor) -> Tensor:
    logits_BK: Tensor = model(images_BCHW)
    return logits_BK
