"""The results of training: float32 weights and the resolved configuration; then certification and registration."""

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError
from torch import nn

import zoo
from certizoo import UserError, __version__
from certizoo.commit import git_commit
from certizoo.documents import read_json
from certizoo.files import write_whole
from certizoo.progress import progress_bar
from certizoo.registry.server import credentials
from certizoo.shards.format.config import TEXT
from certizoo.text import plain
from trainers.engine.engine import Engine
from trainers.job.job import Job, certify_settings
from trainers.weights.ema import Average

CERTIFICATE = "certificate"


def write(job: Job, engine: Engine, average: Average | None, step: int, metrics: dict[str, float]) -> None:
    """Write run_dir/handover/{model.safetensors, config.yaml, metrics.json} on rank 0. Collective.

    The weights are the average's, if there is one.
    """
    model = trained(job, engine, average)
    if model is not None:
        extra = credentials.redacted({key: value for key, value in job.config.items() if key != "model"})
        extra |= {"git_commit": git_commit(), "certizoo": __version__, "ranks": engine.world.size, "steps": step}
        _set_aside(job, step)
        try:
            zoo.handover.save(job.handover, model, job.model, extra)
        except SafetensorError as error:
            raise UserError(
                f"{job.handover} could not be written ({error}); free some space, then repeat the command with "
                "resume=auto"
            ) from None
        if job.data.kind == TEXT:
            write_whole(job.handover / zoo.handover.TOKENIZER, job.data.tokens.read_text())
        write_whole(job.handover / "metrics.json", json.dumps({"step": step, **metrics}, indent=1))
    engine.world.barrier()


def _set_aside(job: Job, step: int) -> None:
    """Rename the certificate and the hand-over of a shorter run that was extended: they are of other weights.

    The hand-over is last, as it holds the step: after a kill in between, the next start renames the rest.
    """
    path = job.handover / "metrics.json"
    before = read_json(path).get("step") if path.is_file() else step
    for folder in (job.run_dir / CERTIFICATE, job.handover):
        if type(before) is int and before < step and folder.is_dir():
            folder.rename(folder.with_name(f"{folder.name}_step{before:08d}"))


def trained(job: Job, engine: Engine, average: Average | None) -> nn.Module | None:
    """Return the model with the current weights, or the average's, on rank 0 only. Collective."""
    state = average.module.state_dict() if average else engine.whole_state()
    if engine.world.rank:
        return None
    with torch.random.fork_rng([]):  # its first weights are drawn
        model = zoo.create_model(**job.model)
    model.load_state_dict(state)
    return model


def certify_and_publish(job: Job) -> None:
    """Certify, register a version and print a table, on rank 0 after the process group is closed."""
    console = Console(highlight=False, markup=False)
    folder, out = job.handover, job.run_dir / CERTIFICATE
    summary: dict[str, Any] = {}
    published = "no (registry.enabled=false)"
    if not job.config["certify"]["enabled"]:
        published = "no: certify.enabled=false, and only certified runs are registered"
    elif job.test_set is None:
        published = "no: there are no test shards to certify"
    else:
        summary = _certified(job, folder, out, console)
        if job.config["registry"]["enabled"]:
            published = _published(job, folder, out)
    metrics = read_json(folder / "metrics.json")
    console.print(closing_table(job, metrics, summary, published))


def _certified(job: Job, folder: Path, out: Path, console: Console) -> dict[str, Any]:
    from certify.stage import run as stage  # imported here because it needs pandas, which training ranks do not use

    try:
        with progress_bar("certifying", console) as progress:
            return stage.run(folder, job.data, certify_settings(job), out, progress)
    except UserError as error:
        raise UserError(f"training is complete, but the hand-over {folder} could not be certified: {error}") from None


def _published(job: Job, folder: Path, out: Path) -> str:
    from certify.stage import register

    settings = job.config["registry"]
    return register.publish(
        folder,
        out,
        registered_name=settings["model_name"],
        experiment=settings["experiment"],
        uri=settings["uri"],
        tags=settings["tags"] or {},
        champion_images=settings["champion_images"],
    )


def closing_table(job: Job, metrics: dict[str, float], summary: dict[str, Any], published: str) -> Table:
    """Return a table of accuracies on test images and of file locations."""
    table = Table(title=Text(plain(job.config["name"])), show_header=False)
    for key in ("clean_acc", "pgd_acc"):
        if key in metrics:
            table.add_row(f"{key} (end of training)", f"{metrics[key]:.1%}")
    norm = summary.get("norm", "").capitalize()  # L2, Linf
    for eps, accuracy in summary.get("accuracy", {}).items():
        table.add_row(f"{norm} {eps}: certified / under PGD", f"{accuracy['certified']:.1%} / {accuracy['pgd']:.1%}")
    table.add_row("weights", Text(plain(str(job.handover))))
    if summary:
        table.add_row("certificate", Text(plain(str(job.run_dir / CERTIFICATE))))
    table.add_row("registered", Text(plain(published)))
    return table
