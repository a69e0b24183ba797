"""Worker of tests/trainers/weights/test_states.py, run on 2 ranks: a checkpoint in the middle, at each ZeRO stage.

Writes {variant: facts, summed over ranks} to the file of the last argument, for the variants that the argument before
it names. The checkpoints stay in runs/NAME/VARIANT.
"""
# ruff: noqa: E402

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch
from safetensors.torch import save_file
from torch import Tensor

from certizoo.config.compose import compose_config
from trainers.entry import launcher_argv
from trainers.job.checkpoint import Position, Saved, tag
from trainers.job.job import Job
from trainers.job.prepare import prepare
from trainers.job.teacher import find_teacher

HALF, LR = 2, 0.05
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"stage": stage} for stage in range(4)},
    **{f"zero{stage}-sgd": {"stage": stage, "optimizer": "sgd"} for stage in (0, 1, 3)},
    "zero0-muon": {"stage": 0, "optimizer": "muon"},
    **{f"zero{stage}-bf16": {"stage": stage, "precision": "bf16"} for stage in (1, 2, 3)},
    **{f"zero{stage}-offloaded": {"stage": stage, "offload": True} for stage in (1, 3)},
    **{f"zero{stage}-bf16-taught": {"stage": stage, "precision": "bf16", "teacher": True} for stage in (2, 3)},
}

# Each stage, and each variant with code of its own.
QUICK = ("zero0", "zero0-muon", "zero1-sgd", "zero2-bf16", "zero3", "zero3-bf16-taught", "zero3-offloaded")
CHOICES = {"quick": QUICK, "rest": tuple(name for name in VARIANTS if name not in QUICK)}


def of(job: Job, name: str, cut: dict[str, Any]) -> Job:
    zero = {"stage": cut["stage"], "offload_optimizer": cut.get("offload", False)}
    return replace(
        job,
        run_dir=job.run_dir / name,
        train=replace(job.train, precision=cut.get("precision", "fp32")),
        deepspeed=replace(
            job.deepspeed, **zero, persistent_below=40
        ),  # at stage 3 some weights stay whole and some are cut
        optimizer=replace(job.optimizer, name=cut.get("optimizer", "adamw")),
        teacher=find_teacher("teacher", None) if cut.get("teacher") else None,
    )


def batches(rank: int, size: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images, labels = torch.rand(16, 1, 8, 8, generator=generator), torch.randint(0, 10, (16,), generator=generator)
    return images.chunk(size)[rank], labels.chunk(size)[rank]


def state(engine: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.whole_state().items()}


def kept(engine: Any) -> list[Tensor]:
    share = engine.share()
    return [share.part(piece, key).clone() for piece in share.pieces for key in share.keys[piece.name]]


def compared(job: Job) -> dict[str, float]:
    from trainers import ranks
    from trainers.engine.world import World
    from trainers.job import checkpoint
    from trainers.steps.run import assemble
    from trainers.steps.step import train_step
    from trainers.weights import saving

    rank, size = ranks.rank(), ranks.world_size()
    world = World(rank, size, torch.device("cpu"))

    def train(run: Any, start: int, end: int) -> None:
        for step in range(start, end):
            train_step(run, iter([batches(rank, size, step)]), step, LR)

    saved = Saved(tag(HALF), Position(HALF, 0, HALF), size, {})
    first = assemble(job, world)
    train(first, 0, HALF)
    saving.save(first.engine, None, job.run_dir, saved, keep=1)
    middle = state(first.engine)
    if rank == 0:
        save_file(middle, job.run_dir / "middle.safetensors")
    train(first, HALF, 2 * HALF)
    found = checkpoint.newest(job.run_dir)
    assert found is not None
    second = replace(
        assemble(replace(job, seed=job.seed + 1), world), job=job
    )  # other weights until the checkpoint is loaded
    saving.load(second.engine, None, job.run_dir, found)
    restored = state(second.engine)
    train(second, HALF, 2 * HALF)
    ends = [state(run.engine) for run in (first, second)]
    both = list(zip(kept(first.engine), kept(second.engine), strict=True))
    return {
        "restored": float(all(torch.equal(restored[key], value) for key, value in middle.items())),
        "weights": float(all(torch.equal(ends[0][key], value) for key, value in ends[1].items())),
        "moved": float(any(not torch.equal(middle[key], value) for key, value in ends[1].items())),
        "kept": float(all(torch.equal(*pair) for pair in both)),
        "entries": float(sum(one.numel() for one, _ in both)),
        "steps": own_steps(second.engine),
    }


def own_steps(engine: Any) -> float:
    """Return the optimiser's own count of steps; SGD has none."""
    optimizer = engine._engine.optimizer
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    return max((float(state["step"]) for state in states if "step" in state), default=2 * HALF)


def main() -> None:
    *overrides, which, out = launcher_argv(sys.argv[1:])
    from trainers.engine import engine

    job = prepare(compose_config("adv_train", overrides))
    world = engine.start(5)
    found = {name: compared(of(job, name, VARIANTS[name])) for name in CHOICES[which]}
    of_both = {
        name: dict(zip(facts, world.sums(torch.tensor([*facts.values()])).tolist(), strict=True))
        for name, facts in found.items()
    }
    if world.rank == 0:
        Path(out).write_text(json.dumps(of_both))
    engine.stop()
    # Many engines refer to the closed process group, whose threads may abort the process at its end.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
