"""Worker of tests/trainers/weights/test_ema_slow.py, run by the launcher: the average of the weights at each stage.

Writes {variant: largest difference from the average written out in float64} to the file of the last argument.
"""
# ruff: noqa: E402

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch
from torch import Tensor

from certizoo.config.compose import compose_config
from trainers.entry import launcher_argv
from trainers.job.job import Job
from trainers.job.prepare import prepare

STEPS, LR, DECAY = 5, 0.05, 0.4  # (1 + t) / (10 + t) is larger from step 2 on, so both branches of the minimum run
VARIANTS = {"zero0": (0, "fp32"), "zero1": (1, "fp32"), "zero2": (2, "fp32"), "zero2-bf16": (2, "bf16")}


def batches(rank: int, size: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images, labels = torch.rand(16, 1, 8, 8, generator=generator), torch.randint(0, 10, (16,), generator=generator)
    return images.chunk(size)[rank], labels.chunk(size)[rank]


def largest_difference(job: Job, stage: int, precision: str, name: str) -> float:
    from trainers import ranks
    from trainers.engine.world import World
    from trainers.steps.run import assemble
    from trainers.steps.step import train_step
    from trainers.weights.ema import Average

    rank, size = ranks.rank(), ranks.world_size()
    train = replace(job.train, precision=precision, ema_decay=DECAY)
    job = replace(job, train=train, deepspeed=replace(job.deepspeed, stage=stage), run_dir=job.run_dir / name)
    run = assemble(job, World(rank, size, torch.device("cpu")))
    average = Average(job, run.engine)
    own = {name: value.double() for name, value in run.engine.whole_state().items()}
    for step in range(1, STEPS + 1):
        train_step(run, iter([batches(rank, size, step)]), step - 1, LR)
        average.update(run.engine, step)
        decay = min(DECAY, (1 + step) / (10 + step))
        trained = dict(run.engine.module.named_parameters())
        for key, value in run.engine.whole_state().items():
            own[key] = decay * own[key] + (1 - decay) * value.double() if key in trained else value.double()
    state = average.module.state_dict()
    assert state.keys() == own.keys()
    moved = max((state[key] - value).abs().max().item() for key, value in run.engine.whole_state().items())
    assert moved > 1e-4, "the average is not the weights"
    return max((state[key].double() - value).abs().max().item() for key, value in own.items())


def main() -> None:
    *overrides, out = launcher_argv(sys.argv[1:])
    from trainers.engine import engine

    job = prepare(compose_config("adv_train", overrides))
    world = engine.start(5)
    worst = {name: largest_difference(job, *cut, name) for name, cut in VARIANTS.items()}
    together = world.sums(torch.tensor(list(worst.values()))).tolist()  # of the other rank's average too
    if world.rank == 0:
        Path(out).write_text(json.dumps(dict(zip(worst, together, strict=True))))
    engine.stop()


if __name__ == "__main__":
    main()
