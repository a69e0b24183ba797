"""One optimiser step: every technique, in the order in which `train_step` calls it.

    for every micro-batch (of which only the last advances the power iteration of capped layers)
        mixed_batch          Mixup and CutMix                                       techniques/mix.py
        embedded             numbers of words become embeddings (text)              sentences.py
        taught               a teacher's soft targets for this batch                techniques/distill.py
        sharpness            SAM: until the gradient is computed, weights are w + e techniques/sam.py
        OBJECTIVES[name]     the loss; its attack sees the bare module, masked      objectives/, techniques/masks.py
        with_penalties       MSVP and hinge, with the last micro-batch              penalties.py
        backward             gradients, which ZeRO sums and cuts over ranks         engine/engine.py
    refuse_non_finite        all ranks agree that the terms are finite
    step                     clip, update, clear; refused as well if the gradient was not finite
    same_buffers             batch statistics of rank 0 are copied to all ranks     engine/world.py

The moving average, the checkpoint and the evaluation come after it (loop.py).

Legend: images_BCHW in [0,1], labels_B (mixed: labels_BK), logits_BK.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from certizoo import UserError
from certizoo.attacks.loop import probing
from trainers.job import checkpoint
from trainers.objectives import OBJECTIVES, Probe, Terms
from trainers.seeds import seed_of
from trainers.steps.run import Run
from trainers.steps.sentences import embedded
from trainers.techniques.distill import distilled
from trainers.techniques.masks import masked
from trainers.techniques.mix import mixed
from trainers.techniques.sam import ascended
from zoo.layers.cap import caps_still
from zoo.models.sentences import Padded

Batch = tuple[Tensor, Tensor]


class NonFinite(UserError):
    """A term or a gradient is not a number, on all ranks alike. `own`: this rank's terms, summed over micro-batches."""

    def __init__(self, message: str, own: dict[str, float]) -> None:
        super().__init__(message)
        self.own = own


def train_step(run: Run, batches: Iterator[Batch], step: int, lr: float) -> dict[str, float]:
    """Make one update; return the objective's terms, averaged over the images of all ranks, and the gradient's norm."""
    core, count = run.engine, run.engine.accumulation
    core.train()
    of_step = make_probe(run, step)
    sums: Terms = {}
    for index in range(count):
        last = index == count - 1
        batch = mixed_batch(run, next(batches), step, index)
        probe, batch = embedded(of_step, core.module, batch)
        probe = taught(run, probe, batch)
        with sharpness(run, probe, batch):
            with nullcontext() if last else caps_still(core.module):
                terms = OBJECTIVES[run.job.objective.name](probe, *batch)
            if last:
                terms = with_penalties(terms, run.penalties_at(probe.progress), count)
            core.backward(terms["loss"])
        for name, value in terms.items():
            sums[name] = sums.get(name, torch.zeros_like(value)) + value.detach()
        if last:
            means = run.world.means({name: value / count for name, value in sums.items()})
            refuse_non_finite(run, means, step, lr, sums)
        core.step(lr, run.job.schedule.momentum(step, run.total_steps))
    if not core.updated():  # ZeRO would silently continue, step after step
        refuse_non_finite(run, {"gradient": math.nan}, step, lr, sums)
    run.world.same_buffers(core.module)
    return means | core.gradient_norm()


def make_probe(run: Run, step: int) -> Probe:
    """Return the objective's view of the model. Dropout and attack draw from streams of (seed, step, rank)."""
    job, core, rank, progress = run.job, run.engine, run.world.rank, step / run.total_steps
    warmup = job.train.attack_warmup
    torch.manual_seed(seed_of(job.seed, "dropout", step, rank))
    # Drawn on the images' device: drawing a batch at 224 pixels on a CPU takes longer than a GPU's whole step.
    generator = Generator(run.world.device).manual_seed(seed_of(job.seed, "attack", step, rank))
    of_masks = Generator().manual_seed(seed_of(job.seed, "masks", step, rank))

    def attack(images_BCHW: Tensor, labels_B: Tensor, kept_BN: Tensor | None = None) -> Tensor:
        # Adversarial training uses the last iterate; several restarts need a choice between them.
        worst = job.attack.restarts > 1
        grown = job.attack.within(min(1.0, progress / warmup)) if warmup else job.attack
        with core.attacked() as module, masked(core.module, job.masks, progress, of_masks) as disturb:
            if kept_BN is not None:
                module = of_padded = Padded(module, kept_BN)
                disturb = of_padded.still
            return grown.run(module, images_BCHW, labels_B, generator, keep_worst=worst, disturb=disturb)

    def predict(images_BCHW: Tensor) -> Tensor:
        with core.precision(), probing(core.module), torch.no_grad():
            logits_BK: Tensor = core.module(images_BCHW)
            return logits_BK

    return Probe(core.through, attack, predict, job.objective, progress, job.train.label_smoothing)


def mixed_batch(run: Run, batch: Batch, step: int, index: int) -> Batch:
    """Apply Mixup and CutMix as configured. The draws are those of (seed, step, rank, micro-batch)."""
    seed = seed_of(run.job.seed, "mix", step, run.world.rank, index)
    return mixed(run.job.mix, *batch, run.job.data.num_classes, seed)


def taught(run: Run, probe: Probe, batch: Batch) -> Probe:
    """Mix the soft targets of the teacher, if there is one, into the probe's cross-entropy."""
    if run.teacher is None:
        return probe
    with run.engine.precision(), torch.no_grad():
        teacher_BK: Tensor = run.teacher(batch[0])
    return replace(probe, taught=partial(distilled, run.job.distill, teacher_BK))


def sharpness(run: Run, probe: Probe, batch: Batch) -> AbstractContextManager[None]:
    """Move the weights to w + e in the block if train.sam_rho is set (techniques/sam.py).

    The pass that finds e draws dropout and drop-path exactly as the pass at w + e, and leaves no trace.
    """
    core, rho, gpu = run.engine, run.job.train.sam_rho, run.world.device.type == "cuda"
    if not rho:
        return nullcontext()

    def plain(measure: Any, *inputs: Any) -> Any:
        with core.precision(), caps_still(core.module), torch.random.fork_rng([run.world.device] if gpu else []):
            return measure(core.module, *inputs)

    loss = OBJECTIVES[run.job.objective.name](replace(probe, through=plain), *batch)["loss"]
    return ascended(core.module, loss, rho)


def with_penalties(terms: Terms, penalties: Terms, accumulation: int) -> Terms:
    """Add accumulation * penalty: `backward` and the means divide by `accumulation`, so it counts once a step."""
    scaled = {name: penalty * accumulation for name, penalty in penalties.items()}
    return {**terms, **scaled, "loss": sum(scaled.values(), terms["loss"])}


def refuse_non_finite(run: Run, means: dict[str, float], step: int, lr: float, own: Terms) -> None:
    """Raise NonFinite before the update: the numbers were summed over ranks, so all ranks stop or none does."""
    broken = [name for name in sorted(means, key=lambda name: name == "loss") if not math.isfinite(means[name])]
    if broken:
        raise NonFinite(
            f"step {step}: {broken[0]} is {means[broken[0]]} at lr {lr:.3g}; checkpoints before it are in "
            f"{checkpoint.folder(run.job.run_dir)}; train again with a lower optimizer.lr and another name=...",
            {name: value.item() for name, value in own.items()},
        )
