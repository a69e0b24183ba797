"""A job made ready to train: the model in its engine, the run folder, the MLflow run."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import zoo
from certizoo.documents import yaml_of
from certizoo.files import write_whole
from certizoo.reading import Reading
from certizoo.registry.server import credentials
from certizoo.registry.tracking.track import Tracker
from certizoo.shards import train_loader
from certizoo.shards.read import TrainBatches
from trainers.engine.engine import Engine
from trainers.engine.world import World
from trainers.job import checkpoint
from trainers.job.checkpoint import Position, Saved
from trainers.job.job import Job
from trainers.job.utilisation import meter
from trainers.steps.penalties import Penalty, penalties_on
from trainers.steps.report import Report
from trainers.steps.sinks import callbacks_of
from zoo.layers.cap import caps_still, settle_caps_


@dataclass(frozen=True)
class Run:
    """A job with its engine, its report, its penalties and a frozen teacher, which no checkpoint contains."""

    job: Job
    engine: Engine
    report: Report
    steps_per_epoch: int
    total_steps: int
    penalties: dict[str, Penalty]
    teacher: nn.Module | None = None

    def penalties_at(self, progress: float) -> dict[str, Tensor]:
        """Return the penalties on weights by name when a share `progress` of the training is done."""
        with caps_still(self.engine.module):  # reading a capped weight would advance its power iteration
            return {
                name: self.engine.of_weights(penalty.owners, penalty.at(progress))
                for name, penalty in self.penalties.items()
            }

    @property
    def world(self) -> World:
        return self.engine.world


def batches_from(run: Run, position: Position, epochs: int = 1) -> TrainBatches:
    """Return this rank's micro-batches of the rest of the position's epoch, and of the epochs after it."""
    job, world, engine = run.job, run.world, run.engine
    own = Reading(world.size, 1, engine.micro_batch, 0)
    return train_loader(
        job.train_set,
        job.data,
        batch_size=engine.micro_batch,
        epoch=position.epoch,
        seed=job.seed,
        rank=world.rank,
        world_size=world.size,
        before=position.readings,
        skip_batches=position.batches(own, job.train.batch_size),
        epochs=epochs,
        per_epoch=run.steps_per_epoch * engine.accumulation,
        device=world.device,
    )


def assemble(job: Job, world: World) -> Run:
    """Build the model, the same on every rank, and its engine; rank 0 opens the run folder."""
    torch.manual_seed(job.seed)
    model = zoo.create_model(**job.model, pretrained=job.first_weights)
    settle_caps_(model)
    if job.penalty.active:
        zoo.penalty.settle_(model)
    penalties = penalties_on(job, model)
    owners = list(dict.fromkeys(owner for penalty in penalties.values() for owner in penalty.owners))
    built = Engine(model, owners, job.train, job.optimizer, job.deepspeed, world)
    world.barrier()  # all ranks have checked the run folder; now it may change
    tracker = None
    if world.rank == 0:
        job.run_dir.mkdir(parents=True, exist_ok=True)
        write_whole(job.run_dir / "config.yaml", yaml_of(credentials.redacted(job.config)))
        start = Saved(checkpoint.tag(0), Position(), world.size, job.fingerprint)
        write_whole(job.run_dir / checkpoint.STARTED, start.mark())
        tracker = open_tracker(job)
    callbacks = None if world.rank else callbacks_of(job)
    report = Report(job.run_dir, job.total_steps, world.rank == 0, meter(job, world.size), tracker, callbacks)
    teacher = job.teacher.load().to(world.device) if job.teacher else None
    return Run(job, built, report, job.steps_per_epoch, job.total_steps, penalties, teacher)


def open_tracker(job: Job) -> Tracker | None:
    """Return the tracker, unless registry.enabled=false; a resumed run continues its old MLflow run."""
    settings = job.config["registry"]
    if not settings["enabled"]:
        return None
    return Tracker(job.run_dir, settings["experiment"], job.config["name"], settings["uri"])
