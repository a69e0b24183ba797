"""Worker of tests/trainers/engine/test_zero.py, run on 2 ranks: one training, cut over ranks in many ways.

Writes, for every way, its distance from one plain PyTorch process with the same global batches: {way: {"loss": the
largest difference of a loss, "weight": of a weight at the end, "sharded": the share of parameters that no rank holds
whole}}.

`stages` runs all ways, `quick` those of QUICK. `arrival` measures how penalties of many sizes reach the weights in
bf16.
"""
# ruff: noqa: E402

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import zoo
from certizoo.config.compose import compose_config
from trainers.entry import launcher_argv
from trainers.job.job import Job
from trainers.job.prepare import prepare
from trainers.settings import HingeConfig, ObjectiveConfig, PenaltyConfig
from zoo.layers.cap import caps_still, settle_caps_

LR, BATCH = 0.05, 16


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.rand(BATCH, 1, 8, 8, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)


def adversarial_loss(job: Job, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    adversarial = job.attack.run(model, images, labels, keep_worst=False)
    return F.cross_entropy(model.train()(adversarial), labels)


def linearised_loss(job: Job, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss image by image with explicit attention: the fused kernels have no second derivative."""
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


@dataclass(frozen=True)
class Curve:
    """The losses and final weights of a training, and the share of weights that was sharded at the end."""

    losses: list[float]
    state: dict[str, Tensor]
    sharded: float = 0.0

    def against(self, other: "Curve") -> dict[str, float]:
        return {
            "loss": max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)),
            "weight": max((self.state[key] - value).abs().max().item() for key, value in other.state.items()),
            "sharded": self.sharded,
        }


def oracle(job: Job, steps: int) -> Curve:
    """Train in one process on the whole batch, without DeepSpeed."""
    torch.manual_seed(job.seed)
    model = zoo.create_model(**job.model)
    settle_caps_(model)
    if job.penalty.active:
        zoo.penalty.settle_(model)
    spared = {name for name, p in model.named_parameters() if p.ndim < 2 or name in ("pos_embed", "cls_token")}
    decay = [p for name, p in model.named_parameters() if name not in spared]
    free = [p for name, p in model.named_parameters() if name in spared]
    groups = [{"params": decay, "weight_decay": job.optimizer.weight_decay}, {"params": free, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=job.optimizer.momentum)
    losses = []
    for step in range(steps):
        images, labels = global_batch(step)
        loss = LOSSES[job.objective.name](job, model, images, labels)
        with caps_still(model):
            if job.penalty.active:
                loss = loss + zoo.penalty.msvp(model, **vars(job.penalty))
            if job.hinge.active:
                loss = loss + job.hinge.weight * zoo.hinge.hinge(model, job.hinge.caps)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), job.train.clip_grad)
        optimizer.step()
        losses.append(loss.item())
    return Curve(losses, {key: value.clone() for key, value in model.state_dict().items()})


def trained(job: Job, steps: int, name: str) -> Curve:
    """Train with our engine, each rank on its share of the batch."""
    from trainers import ranks
    from trainers.engine.world import World
    from trainers.steps.run import assemble
    from trainers.steps.step import train_step

    rank, size = ranks.rank(), ranks.world_size()
    run = assemble(replace(job, run_dir=job.run_dir / name), World(rank, size, torch.device("cpu")))
    losses = []
    for step in range(steps):
        images, labels = (part.chunk(size)[rank] for part in global_batch(step))
        cuts = (part.split(run.engine.micro_batch) for part in (images, labels))
        losses.append(train_step(run, iter(zip(*cuts, strict=True)), step, LR)["loss"])
    gone = [parameter.numel() == 0 for parameter in run.engine.module.parameters()]
    return Curve(losses, run.engine.whole_state(), sum(gone) / len(gone))


def at(job: Job, stage: int, **train: Any) -> Job:
    return replace(job, train=replace(job.train, **train), deepspeed=replace(job.deepspeed, stage=stage))


def modelled(job: Job, name: str, **options: Any) -> Job:
    """Return the same training for another model."""
    shape = {key: job.model[key] for key in ("num_classes", "img_size", "in_chans")}
    return replace(job, model={"name": name, **zoo.model_options(name, **shape, **options)})


SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 4}
# Weights read outside their module, vectors that move in each pass, blocks in stages, no blocks.
MODELS: dict[str, dict[str, Any]] = {
    "l2_vit_ti": SMALL,
    "spec_vit_digits": {},
    "dp_convit_ti": SMALL | {"patch_size": 2},
    "dp_swin_t": {"embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2), "patch_size": 2, "window_size": 2},
    "conv_4c3f": {},
}


def attack_trace(job: Job, stage: int) -> dict[str, float]:
    """Run an attack after a training step; return if it moves images, and if it changes anything else."""
    from trainers import ranks
    from trainers.engine.world import World
    from trainers.steps.run import assemble
    from trainers.steps.step import make_probe, train_step

    rank, size = ranks.rank(), ranks.world_size()
    job = replace(at(job, stage), run_dir=job.run_dir / f"attack-zero{stage}")
    run = assemble(job, World(rank, size, torch.device("cpu")))
    images, labels = (part.chunk(size)[rank] for part in global_batch(0))
    train_step(run, iter([(images, labels)]), 0, LR)
    run.engine.train()
    before = everything(run.engine)
    adversarial = make_probe(run, 1).attack(images, labels)
    return {"moved": float((adversarial != images).any()), "changed": float(everything(run.engine) != before)}


def after_a_broken_gradient(job: Job, stage: int, precision: str) -> dict[str, float]:
    """Return if the engine reports an update, with the last rank's gradient whole and NaN.

    The loss of that rank is finite in both cases.
    """
    from trainers import ranks
    from trainers.engine.world import World
    from trainers.steps.run import assemble

    rank, size = ranks.rank(), ranks.world_size()
    job = replace(at(job, stage, precision=precision), run_dir=job.run_dir / f"broken-{precision}-zero{stage}")
    engine = assemble(job, World(rank, size, torch.device("cpu"))).engine
    images = global_batch(0)[0].chunk(size)[rank]
    answers = []
    for broken in (False, True):
        logits = engine.through(nn.Module.__call__, images).float()
        loss = logits.square().mean()
        if broken and rank == size - 1:
            loss = loss + (logits - logits.detach()).abs().sum().sqrt()
        assert loss.isfinite()
        engine.backward(loss)
        engine.step(LR, None)
        answers.append(float(engine.updated()))
    return {"whole": answers[0], "broken": answers[1]}


def arrived(job: Job, name: str) -> dict[str, float]:
    """Compare the gradient p' that a job's penalty adds before the update with the penalty's own gradient p.

    Returns {"share": <p', p> / <p, p>, "off": |p' - p| / |p|, "logged": the relative error of the penalty in the step's
    terms}. p is computed at these weights in one plain process. Measured at the second step, after one with lr = 0 and
    an update of the average.
    """
    _, without, _ = gradient_of(replace(job, penalty=PenaltyConfig(), hinge=HingeConfig()), f"{name}-without")
    before, found, terms = gradient_of(job, name)
    model = zoo.create_model(**job.model)
    model.load_state_dict(before)
    penalty = zoo.penalty.msvp(model, **vars(job.penalty)) if job.penalty.active else torch.zeros(())
    if job.hinge.active:
        penalty = penalty + job.hinge.weight * zoo.hinge.hinge(model, job.hinge.caps)
    penalty.backward()
    wanted = [0 * weight if weight.grad is None else weight.grad for weight in model.parameters()]
    p = torch.cat([grad.flatten() for grad in wanted]).double()
    p_there = torch.cat([(found[key] - without[key]).flatten() for key in found])
    logged = terms["msvp" if job.penalty.active else "hinge"]
    return {
        "share": float(p_there @ p / (p @ p)),
        "off": float((p_there - p).norm() / p.norm()),
        "logged": abs(logged / penalty.item() - 1),
    }


def gradient_of(job: Job, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    """Return (state before the second step, gradient at its update, the step's terms)."""
    from deepspeed.utils import safe_get_full_grad

    from trainers import ranks
    from trainers.engine.world import World
    from trainers.steps.run import assemble
    from trainers.steps.step import train_step
    from trainers.weights.ema import Average

    rank, size = ranks.rank(), ranks.world_size()
    run = assemble(replace(job, run_dir=job.run_dir / name), World(rank, size, torch.device("cpu")))
    average = Average(job, run.engine) if job.train.ema_decay else None
    update, found = run.engine._engine.step, {}

    def watched() -> None:
        if run.engine._engine.is_gradient_accumulation_boundary():
            for key, weight in run.engine.module.named_parameters():
                grad = safe_get_full_grad(weight)
                found[key] = torch.zeros(weight.shape) if grad is None else grad.double().clone()
        update()

    run.engine._engine.step = watched
    before, terms = {}, {}
    for step in range(2):
        before = {key: value.clone() for key, value in run.engine.whole_state().items()}
        images, labels = (part.chunk(size)[rank] for part in global_batch(0))
        cuts = (part.split(run.engine.micro_batch) for part in (images, labels))
        terms = train_step(run, iter(zip(*cuts, strict=True)), step, 0.0)
        if average:
            average.update(run.engine, step + 1)
    return before, found, terms


def small_penalties(job: Job) -> Iterator[tuple[str, Job]]:
    """Yield the range of configs/space/msvp.yaml and the hinge, with accumulation and the average (ZeRO 0-2)."""
    for stage in range(4):
        bf16 = at(job, stage, precision="bf16", micro_batch_size=2, ema_decay=0.9 if stage < 3 else 0.0)
        for exponent in (-6, -5, -4, -3, -2):
            value = 10.0**exponent
            yield f"1e{exponent}-zero{stage}", replace(bf16, penalty=PenaltyConfig(value, value, value))
        hinge = HingeConfig(weight=1e-6, q=0.1, o=0.1, mlp=0.1)
        yield f"hinge-zero{stage}", replace(bf16, penalty=PenaltyConfig(), hinge=hinge)


def everything(engine: Any) -> list[Any]:
    """Return weights, buffers, gradients, modes and optimiser state in a form to compare bit by bit."""
    state = engine.whole_state()
    optimizer = engine._engine.optimizer
    held = [value for group in getattr(optimizer, "optimizer", optimizer).state.values() for value in group.values()]
    return [
        *((key, value.tolist()) for key, value in state.items()),
        *((p.requires_grad, p.shape, p.grad is None or p.grad.tolist()) for p in engine.module.parameters()),
        *(module.training for module in engine.module.modules()),
        *(value.tolist() for value in held if isinstance(value, Tensor)),
    ]


def ways(job: Job, steps: int) -> Iterator[tuple[Job, int, dict[str, Job]]]:
    """Yield (training of one process, number of steps, ways to cut it); `pgd` takes `steps` steps."""
    hinged = replace(job, penalty=PenaltyConfig(), hinge=HingeConfig(weight=1.0, q=0.1, o=0.1, mlp=0.1))
    linearised = replace(job, objective=ObjectiveConfig("lmce", eps=2.0))
    wider = replace(job, train=replace(job.train, attack_precision="fp32"))
    offloaded = replace(job, deepspeed=replace(job.deepspeed, offload_optimizer=True))
    yield job, steps, {f"pgd-zero{stage}": at(job, stage) for stage in range(4)}
    yield (
        job,
        3,
        {f"accumulated-zero{stage}": at(job, stage, micro_batch_size=2) for stage in range(4)}
        | {f"bf16-zero{stage}": at(job, stage, precision="bf16") for stage in range(4)}
        | {f"bf16-attacked-in-fp32-zero{stage}": at(wider, stage, precision="bf16") for stage in (1, 3)}
        | {f"attacked-in-bf16-zero{stage}": at(job, stage, attack_precision="bf16") for stage in (1, 3)}
        | {f"recomputed-zero{stage}": at(job, stage, grad_checkpointing=True) for stage in range(4)}
        | {f"offloaded-zero{stage}": at(offloaded, stage) for stage in (1, 2, 3)},
    )
    capped = modelled(job, "spec_vit_digits")
    yield capped, 3, {f"capped-zero{stage}": at(capped, stage, micro_batch_size=2) for stage in (1, 3)}
    yield hinged, 3, {f"hinge-zero{stage}": at(hinged, stage) for stage in range(4)}
    yield linearised, 3, {f"lmce-zero{stage}": at(linearised, stage) for stage in range(3)}


def models(job: Job) -> Iterator[tuple[Job, int, dict[str, Job]]]:
    """Yield the same for other models at stage 3."""
    for name, options in MODELS.items():
        other = modelled(job, name, **options)
        if name.startswith("conv"):  # it has no attention to penalise and no blocks to recompute
            other = replace(other, penalty=PenaltyConfig())
            yield other, 3, {name: at(other, 3)}
        else:
            yield other, 3, {name: at(other, 3), f"{name}-recomputed": at(other, 3, grad_checkpointing=True)}


# Each technique at one stage; training and small penalties at a stage with whole weights and one without.
QUICK = (
    *("pgd-zero0", "pgd-zero3", "accumulated-zero3", "hinge-zero2", "recomputed-zero3", "offloaded-zero2"),
    *("lmce-zero2", "capped-zero1", "bf16-zero3", "bf16-attacked-in-fp32-zero3", "attacked-in-bf16-zero3"),
    *("arrived-1e-6-zero1", "arrived-1e-6-zero3", "attack-zero3", "broken-bf16-zero3", "broken-fp32-zero2"),
)


def traces(job: Job) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """Yield the other measurements of every stage."""
    penalised = dict(small_penalties(job))
    for stage in range(4):
        name = f"1e-6-zero{stage}"
        yield f"arrived-{name}", partial(arrived, penalised[name], f"arrived-{name}")
        yield f"attack-zero{stage}", partial(attack_trace, job, stage)
    for precision, stage in product(("fp32", "bf16"), (1, 2, 3)):
        yield f"broken-{precision}-zero{stage}", partial(after_a_broken_gradient, job, stage, precision)


def arrivals(job: Job) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """Yield the measurement of every small penalty."""
    for name, penalised in small_penalties(job):
        yield f"arrived-{name}", partial(arrived, penalised, f"arrived-{name}")


def as_on_a_gpu() -> None:
    """Make DeepSpeed's forward turn off a surrounding autocast, as it does on a GPU but not on a CPU."""
    from deepspeed.runtime import engine

    engine.autocast_if_enabled = lambda _: torch.autocast("cpu", enabled=False)


def main() -> None:
    *overrides, which, out = launcher_argv(sys.argv[1:])
    from trainers.engine import engine

    as_on_a_gpu()
    job = prepare(compose_config("adv_train", overrides))
    world = engine.start(5)
    found: dict[str, dict[str, float]] = {}
    for name, measure in {"models": lambda _: (), "arrival": arrivals}.get(which, traces)(job):
        if which != "quick" or name in QUICK:
            found[name] = measure()
    trainings: Iterable[tuple[Job, int, dict[str, Job]]] = ()
    if which != "arrival":
        trainings = models(job) if which == "models" else ways(job, steps=6 if which == "quick" else 20)
    for plain, steps, cuts in trainings:
        chosen = {name: cut for name, cut in cuts.items() if which != "quick" or name in QUICK}
        expected = oracle(plain, steps)
        for name, cut in chosen.items():
            found[name] = trained(cut, steps, name).against(expected)
    if world.rank == 0:
        Path(out).write_text(json.dumps(found))
    engine.stop()


if __name__ == "__main__":
    main()
