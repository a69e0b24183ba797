"""The image list of a result: the first so many test images, in file order."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import shards
from certify.rows.workers import Batch
from shards.sets import listing_of


@dataclass(frozen=True)
class ImageList:
    """The first `total` images of a test set, which come in batches of `batch_size`."""

    test: shards.ShardSet
    data: shards.DataConfig
    total: int
    batch_size: int

    def batches(self, skip: int = 0) -> Iterator[Batch]:
        """Images skip..total. Where a batch begins does not depend on `skip`, but for the first."""
        seen = 0
        for keys, images, labels in shards.eval_loader(
            self.test, self.data, batch_size=self.batch_size, limit=self.total
        ):
            start = max(0, skip - seen)
            seen += len(keys)
            if start < len(keys):
                yield keys[start:], images[start:], labels[start:]


def image_list(data: shards.DataConfig, count: int | None, batch_size: int) -> ImageList:
    """The first `count` test images, or all where there are fewer, or where it is None. Raises UserError where `data`
    has none."""
    test = shards.find(data, "test")
    return ImageList(test, data, min(test.samples, count or test.samples), batch_size)


def digest(keys: Iterable[str]) -> str:
    """sha256 of the list, by which two results can be seen to be of the same images."""
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()


def class_names(data: shards.DataConfig) -> list[str] | None:
    """What the manifest calls the labels, where it names them all."""
    listing = listing_of(data)
    names = listing.class_names if listing else None
    return names if names and len(names) == data.num_classes else None
