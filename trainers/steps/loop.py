"""Training, in the order of execution.

    process group -> model -> ZeRO engine -> average of the weights -> resume -> for every step:
        attack, objective, penalties, gradient, update: step.py lists every technique in its order
        average of the weights; a heartbeat for the watchdog; all ranks agree whether a stop was requested
        at an epoch's end, when due, or on a stop request: a checkpoint; at an epoch's end: evaluate
        (monitor.py, certify_probe.py)
    -> hand-over -> leave the process group

A step is one update of the weights: `accumulation` micro-batches on each rank (trainers/steps/step.py).
"""

import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from certizoo import UserError
from trainers.engine import engine, logs
from trainers.engine.preempt import Request, Stopped, listening
from trainers.engine.profile import profiled
from trainers.engine.watchdog import Watchdog
from trainers.engine.world import World
from trainers.job import checkpoint
from trainers.job.checkpoint import Position, Saved
from trainers.job.job import Job
from trainers.ranks import said_once
from trainers.settings import TrainConfig
from trainers.steps import certify_probe, nan_batch, pictures
from trainers.steps.monitor import evaluate, monitor_batches
from trainers.steps.report import Report
from trainers.steps.run import Run, assemble, batches_from
from trainers.steps.step import Batch, NonFinite, train_step
from trainers.weights import handover, saving
from trainers.weights.ema import Average

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Session:
    """A run, the average of its weights, its watchdog and its stop requests."""

    run: Run
    average: Average | None
    request: Request
    watchdog: Watchdog
    tick: Callable[[], None]  # after each step, for the profiler

    @property
    def module(self) -> nn.Module:
        """Return the module that is evaluated and handed over."""
        return self.average.module if self.average else self.run.engine.module

    def batches(self, position: Position) -> Generator[Batch, None, None]:
        """Iterate over the batches of all remaining epochs and measure the time spent waiting for each."""
        return self.with_heartbeats(self.run.report.awaited(micro_batches(self.run, position)))

    def with_heartbeats(self, batches: Iterable[T]) -> Generator[T, None, None]:
        """Iterate over the batches with a heartbeat for the watchdog after each."""
        for batch in batches:
            self.watchdog.heartbeat()
            yield batch


def train(job: Job, world: World) -> None:
    """Run the job to its hand-over on every rank of a started group, which is closed afterwards.

    Raises:
        Stopped: the run was asked to stop.
    """
    with said_once():
        run = assemble(job, world)
        average = Average(job, run.engine) if job.train.ema_decay else None
    logs.to_files(job.run_dir)
    watchdog = Watchdog(job.deepspeed.timeout_minutes * 60, world.rank, logs.path_of(job.run_dir, world.rank))
    if job.auto_settings:
        run.report.say("auto settings: " + ", ".join(job.auto_settings))
    position = resume(run, average)
    with run.report.shown(position.step), watchdog.watching():
        recorded = 0 if world.rank else job.train.profile
        with listening() as request, profiled(job.run_dir, recorded) as tick:
            session = Session(run, average, request, watchdog, tick)
            metrics = monitored(session, position.step, position.epoch - 1) if position.ends_epoch else None
            with closing(session.batches(position)) as batches:
                while position.step < run.total_steps:
                    position, metrics = train_epoch(session, position, batches)
        metrics = metrics or monitored(session, position.step, position.epoch)
        handover.write(job, run.engine, average, position.step, metrics)
        if world.rank == 0:
            pictures.draw(job, job.handover, world.device)
    engine.stop()


def resume(run: Run, average: Average | None) -> Position:
    """Restore the newest complete checkpoint, if any, and return the position to continue from."""
    saved = run.job.saved
    if saved is None or not saved.position.step:
        return Position()
    saving.load(run.engine, average, run.job.run_dir, saved)
    run.report.say(f"resuming {run.job.run_dir} at step {saved.position.step}")
    for key in checkpoint.grown(saved, run.job.fingerprint):
        run.report.say(
            f"extended from {key}={saved.fingerprint[key]} to {run.job.fingerprint[key]}: learning rate, warm-ups and "
            f"ramps follow the longer run, {saved.position.step / run.total_steps:.0%} of which are done"
        )
    position = saved.position_for(run.world.size)
    if position.before != saved.position.before:
        run.report.say(f"{saved.world_size} ranks began this epoch; {run.world.size} read the rest of its images")
    log.info("resuming at %s", position)
    return position


def train_epoch(session: Session, position: Position, batches: Iterator[Batch]) -> tuple[Position, dict[str, float]]:
    """Train from `position` to the end of its epoch or of the run; return the new position and the evaluation there."""
    run, job = session.run, session.run.job
    while True:
        step, epoch = position.step, position.epoch
        lr = job.optimizer.lr * job.schedule.factor(step, run.total_steps, run.steps_per_epoch)
        terms = checked_step(run, batches, position, lr)
        session.tick()
        if session.average:
            session.average.update(run.engine, step + 1)
        position = position.after_step(run.steps_per_epoch)
        run.report.advance(position.step)
        if position.step % job.train.log_every == 0 or position.step == run.total_steps:
            pace = run.report.pace(position.step, job.train.batch_size)
            run.report.row(position.step, epoch, {**terms, "lr": lr, **pace})
        ends = position.ends_epoch or position.step == run.total_steps
        asked = session.request.agreed(run.world)
        if asked or checkpoint_due(job.train, position, run.total_steps):
            write_checkpoint(session, position)
        if asked:
            end_stopped(session, position)
        if ends:
            return position, monitored(session, position.step, epoch)


def checkpoint_due(train: TrainConfig, position: Position, total_steps: int) -> bool:
    """Return True if a checkpoint is due after this step; always at the end of the run."""
    by_steps = train.checkpoint_every and position.step % train.checkpoint_every == 0
    by_epochs = position.ends_epoch and position.epoch % train.checkpoint_epochs == 0
    return bool(by_steps or by_epochs or position.step == total_steps)


def checked_step(run: Run, batches: Iterator[Batch], position: Position, lr: float) -> dict[str, float]:
    """Call `train_step`; after a step without finite numbers, list its images in nan_batch.json."""
    try:
        return train_step(run, batches, position.step, lr)
    except NonFinite as error:
        nan_batch.write(run, position, error.own)
        with said_once():
            raise UserError(f"{error}; its images: {run.job.run_dir / nan_batch.FILE}") from None


def micro_batches(run: Run, position: Position) -> Iterator[Batch]:
    """Iterate over the rest of the run exactly as an uninterrupted run would.

    Loader processes start once: an epoch of a small data set takes less time than starting them.
    """
    steps = run.total_steps - position.step + position.batch_in_epoch
    return iter(batches_from(run, position, epochs=math.ceil(steps / run.steps_per_epoch)))


def telling(report: Report, batches: Iterable[T]) -> Iterator[T]:
    """Iterate over the batches of an evaluation; a log gets a line now and then."""
    for done, batch in enumerate(batches):
        report.alive(f"evaluating: {done} batches done")
        yield batch


def monitored(session: Session, step: int, epoch: int) -> dict[str, float]:
    """Return clean and robust accuracy on train.eval_images test images, and certified shares of train.certify_images.

    Empty without test shards.
    """
    run, job, world, metrics = session.run, session.run.job, session.run.world, dict[str, float]()
    if job.test_set is not None and job.train.eval_images:
        with run.engine.precision():  # for monitoring only; the hand-over is attacked and certified in float32
            batches = session.with_heartbeats(monitor_batches(job, run.engine.micro_batch, world))
            told = telling(run.report, batches)
            metrics = evaluate(session.module, told, job.attack, job.seed, world, job.data.num_classes)
    metrics |= certify_probe.probe(job, run.engine, session.average, epoch)
    if metrics:
        run.report.evaluation(step, epoch, metrics)
    return metrics


def write_checkpoint(session: Session, position: Position) -> None:
    """Write a checkpoint; refuse weights that are not finite, so that the newest checkpoint can always be resumed."""
    run = session.run
    with said_once():
        if not run.engine.finite():
            found = checkpoint.folders(run.job.run_dir)
            raise UserError(
                f"step {position.step}: weights are no longer finite; no checkpoint was written; "
                + (f"earlier ones are in {found[-1].parent}; " if found else "")
                + "train again with a lower optimizer.lr and another name=..."
            )
    saved = Saved(checkpoint.tag(position.step), position, run.world.size, run.job.fingerprint)
    saving.save(run.engine, session.average, run.job.run_dir, saved, run.job.train.keep_checkpoints)
    log.info("checkpoint %s", saved.tag)


def end_stopped(session: Session, position: Position) -> None:
    """Report the requested stop on all ranks; the checkpoint is written. Raises Stopped."""
    why = session.request.reason or "another rank"
    session.run.report.say(
        f"stopped by {why} after step {position.step}/{session.run.total_steps}; the checkpoint is in "
        f"{checkpoint.folder(session.run.job.run_dir)}: repeat the command with resume=auto to continue"
    )
    log.info("stopped by %s after step %d", why, position.step)
    raise Stopped(session.request.signum)
