"""A job brought to life: the model under its engine, the run folder open, MLflow told."""

from dataclasses import dataclass

import torch
import yaml
from torch import Tensor, nn

import zoo
from certizoo import UserError
from certizoo.files import write_whole
from registry.track import Tracker
from trainers.engine import Engine, World
from trainers.job import Job
from trainers.report import Report


@dataclass(frozen=True)
class Run:
    """A job with its engine and its audience."""

    job: Job
    engine: Engine
    report: Report
    steps_per_epoch: int
    total_steps: int

    @property
    def world(self) -> World:
        return self.engine.world


def assemble(job: Job, world: World) -> Run:
    """The model, the same on every rank, under its engine; rank 0 opens the run folder and the tracking."""
    torch.manual_seed(job.seed)
    model = zoo.create_model(**job.model, pretrained=job.first_weights)
    check_penalties(job, model)
    built = Engine(model, job.train, job.optimizer, job.deepspeed, world)
    world.barrier()  # all ranks have looked into the run folder; now it may change
    tracker = None
    if world.rank == 0:
        job.run_dir.mkdir(parents=True, exist_ok=True)
        write_whole(job.run_dir / "config.yaml", yaml.safe_dump(job.config, sort_keys=False))
        tracker = open_tracker(job)
    total = job.total_steps(world.size)
    report = Report(job.run_dir, total, speaks=world.rank == 0, tracker=tracker)
    return Run(job, built, report, job.steps_per_epoch(world.size), total)


def open_tracker(job: Job) -> Tracker | None:
    """MLflow, unless registry.enabled=false; a resumed run goes on in its old MLflow run."""
    settings = job.config["registry"]
    if not settings["enabled"]:
        return None
    tracker = Tracker(job.run_dir, uri=settings["uri"])
    run_id = job.saved.run_id if job.saved else None
    tracker.start(settings["experiment"], job.config["name"], job.config, run_id=run_id)
    return tracker


def check_penalties(job: Job, model: nn.Module) -> None:
    """Raise UserError where a penalty has nothing to penalise."""
    try:
        with torch.no_grad():
            penalties_of(job, model, 0.0)
    except ValueError as error:
        raise UserError(f"penalty: {error}; use penalty=none hinge=none") from None


def penalties_of(job: Job, model: nn.Module, progress: float) -> dict[str, Tensor]:
    """Those on weights, by name: MSVP and the hinge, as the job weighs them."""
    found = {}
    if job.penalty.active:
        found["msvp"] = zoo.penalty.msvp(model, **vars(job.penalty))
    if job.hinge.active:
        found["hinge"] = job.hinge.weight * zoo.hinge.hinge(model, job.hinge.caps, job.hinge.slack_at(progress))
    return found
