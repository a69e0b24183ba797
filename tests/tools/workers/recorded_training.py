"""`trainers/adv_train.py` that writes the keys of every micro-batch to keys-RANK-of-RANKS.txt, one line each."""

from collections.abc import Iterator
from pathlib import Path

from certizoo.shards.batch import Batch
from certizoo.shards.read import TrainBatches
from trainers import ranks
from trainers.entry import main

received = TrainBatches.received


def recorded(loader: TrainBatches) -> Iterator[Batch]:
    path = Path(f"keys-{ranks.rank()}-of-{ranks.world_size()}.txt")
    for batch in received(loader):
        with path.open("a") as file:
            file.write(" ".join(batch.keys) + "\n")
        yield batch


if __name__ == "__main__":
    TrainBatches.received = recorded  # type: ignore[method-assign, assignment]
    main("adv_train")
