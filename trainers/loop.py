"""Training, in the order things happen.

    process group -> model -> ZeRO engine -> resume -> for every step:
        for every micro-batch: attack on the bare module, forward through the engine, objective, backward
        with the last micro-batch: + MSVP; all ranks agree that the numbers are finite; clip and update
        at an epoch's end: evaluate, then a checkpoint
    -> hand-over -> leave the process group

A step is one update of the weights: `accumulation` micro-batches on each rank (trainers/step.py).
"""

from collections.abc import Iterator

from certizoo import UserError
from shards import eval_loader, train_loader
from trainers import checkpoint, engine, handover
from trainers.checkpoint import Position, Saved
from trainers.evaluate import evaluate
from trainers.job import Job
from trainers.place import said_once
from trainers.run import Run, assemble
from trainers.step import Batch, train_step


def train(job: Job) -> str | None:
    """Run the job to its hand-over, on every rank. Returns rank 0's tracking id; the process group is gone then."""
    world = engine.start(job.deepspeed.timeout_minutes)
    with said_once():
        run = assemble(job, world)
    position = Position()
    if job.saved:
        position = job.saved.position
        run.engine.load(checkpoint.folder(job.run_dir), job.saved.tag)
        run.report.say(f"resuming {job.run_dir} at step {position.step}")
    with run.report.shown(position.step):
        metrics = None
        while position.step < run.total_steps:
            position, metrics = train_epoch(run, position)
        handover.write(job, run.engine, position.step, metrics or measure(run, position.step, position.epoch))
        if run.report.tracker:
            run.report.tracker.log_artifacts(job.run_dir / handover.FOLDER, handover.FOLDER)
    engine.stop()
    return run.report.tracker.run_id if run.report.tracker else None


def train_epoch(run: Run, position: Position) -> tuple[Position, dict[str, float] | None]:
    """From `position` to the end of its epoch or of the run. Returns where it stopped, and the evaluation there."""
    job, metrics = run.job, None
    batches = micro_batches(run, position)
    for batch_in_epoch in range(position.batch_in_epoch, run.steps_per_epoch):
        step, epoch = position.step, position.epoch
        lr = job.optimizer.lr * job.schedule.factor(step, run.total_steps, run.steps_per_epoch)
        terms = train_step(run, batches, step, lr)
        position = Position(step + 1, epoch, batch_in_epoch + 1)
        run.report.advance(position.step)
        if position.step % job.train.log_every == 0 or position.step == run.total_steps:
            speed = run.report.images_per_second(position.step, job.train.batch_size)
            run.report.row(position.step, epoch, {**terms, "lr": lr, "images_per_s": speed})
        if position.batch_in_epoch == run.steps_per_epoch:
            position = Position(position.step, epoch + 1, 0)
        ends = position.batch_in_epoch == 0 or position.step == run.total_steps
        if ends:
            metrics = measure(run, position.step, epoch)
        if ends or (job.train.checkpoint_every and position.step % job.train.checkpoint_every == 0):
            keep(run, position)
        if ends:
            break
    return position, metrics


def micro_batches(run: Run, position: Position) -> Iterator[Batch]:
    """The rest of the epoch, exactly as an undisturbed run would see it."""
    job, world = run.job, run.world
    loader = train_loader(
        job.train_set,
        job.data,
        batch_size=run.engine.micro_batch,
        epoch=position.epoch,
        seed=job.seed,
        rank=world.rank,
        world_size=world.size,
        skip_batches=position.batch_in_epoch * run.engine.accumulation,
    )
    return ((images.to(world.device), labels.to(world.device)) for images, labels in loader)


def measure(run: Run, step: int, epoch: int) -> dict[str, float]:
    """Clean and robust accuracy on train.eval_images test images; nothing without test shards."""
    job, world = run.job, run.world
    if job.test_set is None or job.train.eval_images == 0:
        return {}
    batches = eval_loader(
        job.test_set,
        job.data,
        batch_size=run.engine.micro_batch,
        limit=job.train.eval_images,
        rank=world.rank,
        world_size=world.size,
    )
    with run.engine.precision():  # a monitor; the hand-over is attacked and certified in float32
        metrics = evaluate(run.engine.module, batches, job.attack, job.seed, world)
    run.report.row(step, epoch, metrics)
    return metrics


def keep(run: Run, position: Position) -> None:
    """A checkpoint, of finite weights only: the newest one must be worth resuming."""
    with said_once():
        if not run.engine.finite():
            raise UserError(
                f"step {position.step}: weights are no longer finite; no checkpoint was written, earlier ones are in "
                f"{checkpoint.folder(run.job.run_dir)}; train again with a lower optimizer.lr and another name=..."
            )
    run_id = run.report.tracker.run_id if run.report.tracker else None
    saved = Saved(checkpoint.tag(position.step), position, run.world.size, run_id, run.job.fingerprint)
    checkpoint.save(run.engine, run.job.run_dir, saved, run.job.train.keep_checkpoints)
