"""The images of a step with a non-finite loss or gradient, in run_dir/nan_batch.json."""

import json
import math
from itertools import islice

from certizoo.files import write_whole
from trainers.job.checkpoint import Position
from trainers.steps.run import Run, batches_from

FILE = "nan_batch.json"


def write(run: Run, position: Position, own: dict[str, float]) -> None:
    """Write the file. Collective. `own`: this rank's terms of the step that began at `position`.

    It holds step and epoch, and for each rank its terms, whether they are finite, and the keys of its micro-batches.
    """
    mine = {"finite": all(map(math.isfinite, own.values())), "terms": own, "keys": keys_of(run, position)}
    ranks = [json.loads(text) for text in run.world.texts(json.dumps(mine))]
    if run.world.rank == 0:
        record = {"step": position.step, "epoch": position.epoch, "ranks": ranks}
        write_whole(run.job.run_dir / FILE, json.dumps(record, indent=1))


def keys_of(run: Run, position: Position) -> list[list[str]]:
    """Return the keys of this rank's samples in that step, read again: one list per micro-batch."""
    return [batch.keys for batch in islice(batches_from(run, position).received(), run.engine.accumulation)]
