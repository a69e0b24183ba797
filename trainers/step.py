"""One optimiser step: objective and backward for every micro-batch; penalty, check and update with the last one.

Legend: images_BCHW in [0,1], labels_B.
"""

import math
from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from certizoo import UserError
from trainers import checkpoint
from trainers.objectives import OBJECTIVES, Probe, Terms
from trainers.place import said_once
from trainers.run import Run, penalties_of
from trainers.seeds import seed_of

Batch = tuple[Tensor, Tensor]


def train_step(run: Run, batches: Iterator[Batch], step: int, lr: float) -> dict[str, float]:
    """One update. Returns the objective's terms, averaged over its images on all ranks."""
    core, count = run.engine, run.engine.accumulation
    core.train()
    probe = make_probe(run, step)
    sums: Terms = {}
    for index in range(count):
        last = index == count - 1
        terms = OBJECTIVES[run.job.objective.name](probe, *next(batches))
        if last:
            terms = with_penalties(terms, penalties_of(run.job, core.module, probe.progress), count)
        core.backward(terms["loss"])
        for name, value in terms.items():
            sums[name] = sums.get(name, torch.zeros_like(value)) + value.detach()
        if last:
            means = run.world.means({name: value / count for name, value in sums.items()})
            refuse_non_finite(run, means, step, lr)
        core.step(lr)
    if not core.updated():  # ZeRO would go on without a word, step after step
        refuse_non_finite(run, {"gradient": math.nan}, step, lr)
    run.world.same_buffers(core.module)
    return means


def make_probe(run: Run, step: int) -> Probe:
    """The objective's view of the model. Dropout and attack draw from streams of (seed, step, rank)."""
    job, core, rank = run.job, run.engine, run.world.rank
    torch.manual_seed(seed_of(job.seed, "dropout", step, rank))
    generator = Generator().manual_seed(seed_of(job.seed, "attack", step, rank))

    def attack(images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
        # The last iterate is what adversarial training follows; several restarts need a choice between them.
        worst = job.attack.restarts > 1
        with core.precision():
            return job.attack.run(core.module, images_BCHW, labels_B, generator, keep_worst=worst)

    return Probe(core.through, attack, job.objective, step / run.total_steps, job.train.label_smoothing)


def with_penalties(terms: Terms, penalties: Terms, accumulation: int) -> Terms:
    """loss + accumulation * penalty: `backward` and the means divide by `accumulation`, so it counts once a step."""
    scaled = {name: penalty * accumulation for name, penalty in penalties.items()}
    return {**terms, **scaled, "loss": sum(scaled.values(), terms["loss"])}


def refuse_non_finite(run: Run, means: dict[str, float], step: int, lr: float) -> None:
    """Before the update: the numbers were summed over ranks, so all ranks stop or none does."""
    broken = [name for name in sorted(means, key=lambda name: name == "loss") if not math.isfinite(means[name])]
    if broken:
        with said_once():
            raise UserError(
                f"step {step}: {broken[0]} is {means[broken[0]]} at lr {lr:.3g}; checkpoints before it are in "
                f"{checkpoint.folder(run.job.run_dir)}; train again with a lower optimizer.lr and another name=..."
            )
