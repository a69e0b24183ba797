"""Worker of tests/trainers/objectives/test_steps.py, run on 2 ranks: two real steps of every objective and option.

Writes {case: {"terms": the terms of each step, "moved": the largest change of a weight, "apart": its difference between
ranks, "off": the distance from the oracle}} to the file of the last argument.
"""
# ruff: noqa: E402

import json
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch
from torch import Tensor
from torch.nn import functional as F

import zoo
from certizoo.config.compose import compose_config
from trainers.entry import launcher_argv
from trainers.job.job import Job
from trainers.job.prepare import prepare
from trainers.objectives import LIPSCHITZ, OBJECTIVES

STEPS, LR, BATCH = 2, 0.05, 16
CONV = ["+model=conv_4c3f_mnist", "data=digits", "attack=pgd_l2", "train.batch_size=64", "optimizer=sgd"]
CONV += ["registry.enabled=false", "certify.enabled=false"]


def cases(tiny: list[str]) -> dict[str, list[str]]:
    """Return the overrides of each case."""
    found = {name: [*(CONV if name in LIPSCHITZ else tiny), f"objective={name}"] for name in OBJECTIVES}
    found |= {
        f"sam-zero{stage}": [*tiny, "objective=clean", "train.sam_rho=0.1", f"deepspeed=zero{stage}"]
        for stage in range(3)
    }
    mixing = ["mix.mixup=0.8", "mix.cutmix=1.0", "train.label_smoothing=0.1"]
    found |= {f"{name}-mixed": [*tiny, f"objective={name}", *mixing] for name in ("clean", "pgd_at", "trades")}
    taught = ["distill.teacher=teacher", "distill.temperature=2"]
    found |= {f"{name}-taught": [*tiny, f"objective={name}", *taught] for name in ("clean", "pgd_at", "trades")}
    found |= {f"clean-taught-zero{stage}": [*found["clean-taught"], f"deepspeed=zero{stage}"] for stage in (0, 3)}
    found["trades-unheard"] = [*found["trades-taught"], "distill.alpha=0"]
    found["pgd_at-masked"] = [*tiny, "masks.ard=true", "masks.prm=true"]
    found["pgd_at-sam-mixed-masked"] = [*found["pgd_at-masked"], "train.sam_rho=0.05", *mixing]
    return found


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.rand(BATCH, 1, 8, 8, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)


def sam_oracle(job: Job, size: int) -> dict[str, Tensor]:
    """Take the steps in one plain process, where each rank's part of the batch has its own ascent."""
    torch.manual_seed(job.seed)
    model = zoo.create_model(**job.model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=job.optimizer.momentum)
    for step in range(STEPS):
        parts = zip(*(part.chunk(size) for part in global_batch(step)), strict=True)
        total = [torch.zeros_like(weight) for weight in model.parameters()]
        for images, labels in parts:
            start = [weight.detach().clone() for weight in model.parameters()]
            grads = torch.autograd.grad(F.cross_entropy(model(images), labels), list(model.parameters()))
            length = torch.sqrt(sum((grad.square().sum() for grad in grads), torch.zeros(())))
            with torch.no_grad():
                for weight, grad in zip(model.parameters(), grads, strict=True):
                    weight.add_(job.train.sam_rho * grad / length)
            uphill = torch.autograd.grad(F.cross_entropy(model(images), labels), list(model.parameters()))
            with torch.no_grad():
                for weight, value in zip(model.parameters(), start, strict=True):
                    weight.copy_(value)
            total = [sum_ + grad / size for sum_, grad in zip(total, uphill, strict=True)]
        for weight, grad in zip(model.parameters(), total, strict=True):
            weight.grad = grad
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.train.clip_grad)
        optimizer.step()
    return {key: value.clone() for key, value in model.state_dict().items()}


def trained(name: str, overrides: list[str], world: Any) -> dict[str, Any]:
    from trainers.steps.run import assemble
    from trainers.steps.step import train_step

    job = prepare(compose_config("adv_train", [*overrides, f"name={name}", "train.batch_size=16"]))
    run = assemble(job, world)
    before = {key: value.clone() for key, value in run.engine.whole_state().items()}
    terms = []
    for step in range(STEPS):
        images, labels = (part.chunk(world.size)[world.rank] for part in global_batch(step))
        terms.append(train_step(run, iter([(images, labels)]), step, LR))
    after = run.engine.whole_state()
    weights = dict(run.engine.module.named_parameters())
    sums = world.sums(torch.stack([after[key].double().sum() for key in weights])) / world.size
    found = {
        "terms": terms,
        "moved": max((after[key] - before[key]).abs().max().item() for key in weights),
        "apart": max(abs(sums[i].item() - after[key].double().sum().item()) for i, key in enumerate(weights)),
    }
    if name.startswith("sam"):
        oracle = sam_oracle(job, world.size)
        found["off"] = max((after[key] - oracle[key]).abs().max().item() for key in weights)
    return found


def main() -> None:
    *tiny, out = launcher_argv(sys.argv[1:])
    from trainers.engine import engine

    world = engine.start(5)
    found: dict[str, Any] = {name: trained(name, overrides, world) for name, overrides in cases(tiny).items()}
    found["loaded inductor"] = "torch._inductor.compile_fx" in sys.modules
    if world.rank == 0:
        Path(out).write_text(json.dumps(found))
    engine.stop()


if __name__ == "__main__":
    main()
