"""CertViT (docs/references.md#certvit, section 3.5): a pretrained model with smaller norms, in three stages.

    run_dir/adapt/         1. dot-product weights in L2 attention (or none), trained: an ordinary run
    run_dir/layers/        2. every layer constrained separately (douglas_rachford.py), one file each, by all ranks
    run_dir/constrained/      all layers together: a hand-over, and report.json with norms before and after
    run_dir/finetune/      3. trained from there: an ordinary run, certified and published like any other

With resume=auto each stage continues: the runs from their checkpoints, stage 2 after its last layer.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import zoo
from certify.papers import paper_bounds
from certizoo import UserError
from certizoo.config.compose import compose_config
from certizoo.files import whole_file, write_whole
from certizoo.registry.server import credentials
from certizoo.shards import train_loader
from trainers import ranks
from trainers.certvit.douglas_rachford import solve
from trainers.certvit.layers import constrainable, norm, observe
from trainers.certvit.prox import magnitude_quantile
from trainers.engine import engine
from trainers.engine.world import World
from trainers.job.job import Job
from trainers.job.stages import Stages, prepare_stages
from trainers.seeds import seed_of
from trainers.settings import ConstrainConfig
from trainers.steps import loop
from trainers.steps.run_lock import run_lock
from trainers.weights import handover, states

FACT = ("layer", "norm_before", "norm_after", "zeros", "missed")


def run(config_name: str, overrides: Sequence[str]) -> None:
    """Run all three stages, on every rank."""
    with ranks.said_once():
        stages = prepare_stages(compose_config(config_name, overrides))
    world = engine.start(stages.adapt.deepspeed.timeout_minutes)
    with run_lock(stages.folder, world, stages.refuse_changed):
        with engine.kept():
            if stages.settings.adapt_epochs and not Path(stages.weights).is_file():
                loop.train(stages.adapt, world)
            constrain(stages, world)
            last = finetune(stages, world) if stages.settings.finetune_epochs else None
        engine.stop()
        if last and world.rank == 0:
            handover.certify_and_publish(last)


def finetune(stages: Stages, world: World) -> Job:
    """Run stage 3 and return its job.

    The zeros may grow again; report.json states the norms before this stage.
    """
    with ranks.said_once():
        job = stages.finetune()
    loop.train(job, world)
    return job


# stage 2 -------------------------------------------------------------------------------------------------------------


def constrain(stages: Stages, world: World) -> None:
    """Constrain every layer that has no file yet, divided among the ranks; then rank 0 assembles them."""
    job, settings, layers = stages.adapt, stages.settings, stages.settings_file.parent
    if stages.report.is_file():
        return
    with ranks.said_once():
        model = zoo.create_model(**job.model, pretrained=stages.weights).to(world.device).eval()
    if world.rank == 0:
        layers.mkdir(parents=True, exist_ok=True)
        write_whole(stages.settings_file, stages.settings_text)
    names = constrainable(model)
    images = [images_BCHW.to(world.device) for images_BCHW in batches(job, settings)]
    for name in names[world.rank :: world.size]:
        path = layers / f"{name}.safetensors"
        if not path.is_file():
            constrain_layer(model, name, images, settings, seed_of(job.seed, "rows", name), path)
    while not all((layers / f"{name}.safetensors").is_file() for name in names):
        time.sleep(1)  # ranks finish at different times, hours apart for large models; a collective would time out
    if world.rank == 0:
        assemble(stages, model, names, images)
    world.barrier()


def batches(job: Job, settings: ConstrainConfig) -> list[Tensor]:
    """Return the first mini-batches of training images; the same on every rank."""
    loader = train_loader(job.train_set, job.data, batch_size=settings.batch_size, epoch=0, seed=job.seed)
    return [batch[-2] for batch, _ in zip(loader, range(settings.batches), strict=False)]


def constrain_layer(
    model: nn.Module, name: str, images: Sequence[Tensor], settings: ConstrainConfig, seed: int, path: Path
) -> None:
    """Write one file with the layer's new weight and its statistics, a function of the arguments."""
    data, module = observe(model, name, images, settings.rows, seed), model.get_submodule(name)
    weight = module.get_parameter("weight")
    before, old = norm(module, data.out_size), weight.detach().clone()
    w = old.flatten(1).double()
    gamma = float(magnitude_quantile(w, settings.level))
    w = solve(
        w, data.rows, gamma=gamma, eta=settings.eta, rate=settings.rate, iterations=settings.iterations,
        passes=settings.passes,
    )  # fmt: skip
    with torch.no_grad():
        weight.copy_(w.reshape(old.shape))
        after, zeros = norm(module, data.out_size), float((weight == 0).double().mean())
        missed = max(rows.share(weight.flatten(1).double()) for rows in data.rows)
        new = weight.detach().clone()
        weight.copy_(old)  # the other layers are constrained on activations of the original model
    fact = dict(zip(FACT, (name, before, after, zeros, missed), strict=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        save_file({"weight": new}, part, {"fact": json.dumps(fact)})


def assemble(stages: Stages, model: nn.Module, names: Sequence[str], images: Sequence[Tensor]) -> None:
    """Write run_dir/constrained on rank 0 and print a table."""
    job, before, rows = stages.adapt, float(paper_bounds.product(model, images[0])), []
    with torch.no_grad():
        for name in names:
            path = stages.settings_file.with_name(f"{name}.safetensors")
            weight = model.get_submodule(name).get_parameter("weight")
            new, fact = read_layer(path, weight)
            weight.copy_(new)
            rows.append(fact)
    after = float(paper_bounds.product(model, images[0]))
    extra = credentials.redacted({key: value for key, value in job.config.items() if key != "model"})
    zoo.handover.save(stages.constrained, model, job.model, extra)
    report = {"product_before": before, "product_after": after, "layers": rows}
    write_whole(stages.report, json.dumps(report, indent=1))
    Console(highlight=False, markup=False).print(table(report))


def read_layer(path: Path, weight: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Read the file of `constrain_layer`: the new weight, shaped as `weight`, and its statistics.

    Raises:
        UserError: the file was not written by this run.
    """
    try:
        new = states.read_exact(path, {"weight": weight})["weight"]
        with safe_open(path, "pt") as file:
            fact = json.loads((file.metadata() or {}).get("fact", "null"))
        if not isinstance(fact, dict) or tuple(fact) != FACT or {type(fact[key]) for key in FACT[1:]} != {float}:
            raise ValueError("the layer's statistics are missing")
    except states.UNREADABLE as error:
        raise UserError(
            f"{path} is not a file of this run ({str(error)[:200]}); delete it and repeat the command"
        ) from None
    return new, fact


def table(report: dict[str, Any]) -> Table:
    """Return a table with one line per layer and the products of CertViT, eq. 2."""
    title = f"product bound {report['product_before']:.3g} -> {report['product_after']:.3g}"
    found = Table("layer", "norm before", "after", "zeros", "output missed", title=title)
    for row in report["layers"]:
        norms = (f"{row['norm_before']:.3f}", f"{row['norm_after']:.3f}")
        found.add_row(row["layer"], *norms, f"{row['zeros']:.1%}", f"{row['missed']:.2%}")
    return found
