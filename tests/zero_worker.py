"""Run by test_trainers_zero.py under the launcher: three steps of every way to cut the same global batch.

Writes {variant: largest difference of a weight from one plain PyTorch process} to the file of the last argument.
"""
# ruff: noqa: E402

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import zoo
from certizoo.compose import compose_config
from trainers.entry import launcher_argv
from trainers.job import Job, prepare
from trainers.settings import ObjectiveConfig

STEPS, LR, BATCH = 3, 0.05, 16


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.rand(BATCH, 1, 8, 8, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)


def adversarial_loss(job: Job, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    adversarial = job.attack.run(model, images, labels, keep_worst=False)
    return F.cross_entropy(model.train()(adversarial), labels)


def linearised_loss(job: Job, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Image by image, with the attention written out: the fused kernels have no second derivative."""
    losses = []
    with sdpa_kernel(SDPBackend.MATH):
        for image, label in zip(images, labels.tolist(), strict=True):
            x = image[None].clone().requires_grad_()
            logits = model.train()(x)[0]
            runner_up = max((k for k in range(len(logits)) if k != label), key=lambda k: float(logits[k]))
            (g,) = torch.autograd.grad(logits[label] - logits[runner_up], x, create_graph=True)
            wrong = torch.arange(len(logits)) != label
            losses.append(
                F.cross_entropy((logits + job.objective.eps * g.norm() * wrong)[None], labels.new_tensor([label]))
            )
    return torch.stack(losses).mean()


LOSSES = {"pgd_at": adversarial_loss, "lmce": linearised_loss}


def oracle(job: Job) -> dict[str, Tensor]:
    """One process, the whole batch, no DeepSpeed."""
    torch.manual_seed(job.seed)
    model = zoo.create_model(**job.model)
    decay = [p for p in model.parameters() if p.ndim >= 2]
    free = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": job.optimizer.weight_decay}, {"params": free, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=job.optimizer.momentum)
    for step in range(STEPS):
        images, labels = global_batch(step)
        loss = LOSSES[job.objective.name](job, model, images, labels) + zoo.penalty.msvp(model, **vars(job.penalty))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), job.train.clip_grad)
        optimizer.step()
    return {key: value.clone() for key, value in model.state_dict().items()}


def variant(job: Job, stage: int, micro: int | None, name: str, precision: str = "fp32") -> dict[str, Tensor]:
    from trainers.engine import World
    from trainers.place import place
    from trainers.run import assemble
    from trainers.step import train_step

    rank, _, size = place()
    train = replace(job.train, micro_batch_size=micro, precision=precision)
    job = replace(job, train=train, deepspeed=replace(job.deepspeed, stage=stage), run_dir=job.run_dir / name)
    run = assemble(job, World(rank, size, torch.device("cpu")))
    for step in range(STEPS):
        images, labels = (part.chunk(size)[rank] for part in global_batch(step))
        cuts = (part.split(run.engine.micro_batch) for part in (images, labels))
        train_step(run, iter(zip(*cuts, strict=True)), step, LR)
    return run.engine.float32_state()


def main() -> None:
    *overrides, out = launcher_argv(sys.argv[1:])
    from trainers import engine

    job = prepare(compose_config("adv_train", overrides))
    world = engine.start(5)
    lmce_job = replace(job, objective=ObjectiveConfig("lmce", eps=2.0))
    expected, lmce_expected = oracle(job), oracle(lmce_job)
    variants: dict[str, tuple[int, int | None]] = {f"zero{stage}": (stage, None) for stage in (0, 1, 2)}
    variants |= {f"zero{stage}-accumulated": (stage, 2) for stage in (0, 1, 2)}
    worst = {}
    for name, (stage, micro) in variants.items():
        state = variant(job, stage, micro, name)
        worst[name] = {key: (state[key] - value).abs().max().item() for key, value in expected.items()}
        state = variant(lmce_job, stage, micro, f"lmce-{name}")
        worst[f"lmce-{name}"] = {key: (state[key] - value).abs().max().item() for key, value in lmce_expected.items()}
    masters = variant(job, 2, None, "bf16", precision="bf16")
    worst["bf16"] = {key: (masters[key] - value).abs().max().item() for key, value in expected.items()}
    weight = masters["head.weight"]
    worst["bf16 masters beyond bf16"] = {"head.weight": (weight - weight.bfloat16().float()).abs().max().item()}
    if world.rank == 0:
        Path(out).write_text(json.dumps({name: max(by_key.values()) for name, by_key in worst.items()}))
    engine.stop()


if __name__ == "__main__":
    main()
