"""The image list of a result: the first so many test images, in file order."""

import hashlib
from collections.abc import Iterable, Iterator

import shards
from certify.rows.workers import Batch
from shards.sets import listing_of


def batches(
    test: shards.ShardSet, data: shards.DataConfig, batch_size: int, total: int, skip: int = 0
) -> Iterator[Batch]:
    """Images skip..total; where a batch begins does not depend on `skip`, but for the first."""
    seen = 0
    for keys, images, labels in shards.eval_loader(test, data, batch_size=batch_size, limit=total):
        start = max(0, skip - seen)
        seen += len(keys)
        if start < len(keys):
            yield keys[start:], images[start:], labels[start:]


def digest(keys: Iterable[str]) -> str:
    """sha256 of the list, by which two results can be seen to be of the same images."""
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()


def class_names(data: shards.DataConfig) -> list[str] | None:
    """What the manifest calls the labels, where it names them all."""
    listing = listing_of(data)
    names = listing.class_names if listing else None
    return names if names and len(names) == data.num_classes else None
