"""The training batches of a run from a position on."""

from certizoo.shards import Reading, train_loader
from certizoo.shards.read import TrainBatches
from trainers.job.checkpoint import Position
from trainers.steps.run import Run


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
