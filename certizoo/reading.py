"""The way ranks read an epoch, or a part of it: known to loaders and to checkpoints, and free of heavy imports."""

from typing import NamedTuple


class Reading(NamedTuple):
    """A number of batches that each of `ranks` has read, or will read, with `workers` loader processes each."""

    ranks: int
    workers: int
    batch_size: int
    batches: int

    @property
    def drawn(self) -> int:
        """Return the number of samples of all ranks."""
        return self.ranks * self.batch_size * self.batches
