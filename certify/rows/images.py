"""The image list of a result: a number of test images, in file order."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from certify.rows.row_schema import Listed
from certify.rows.workers import Batch
from certizoo import UserError, shards
from certizoo.config.schema import FilePath, Section, Whole
from certizoo.files import sha256
from certizoo.shards.format.config import TEXT
from certizoo.shards.sets import listing_of, warn_of_empty_classes


@dataclass(frozen=True)
class Share(Section):
    """The images of a test set from `first` on, and results of ranges to reuse.

    `parts` are folders of finished results of such ranges, each continuing where the one before it ends. Their rows are
    reused.
    """

    first: Whole = 0
    parts: tuple[FilePath, ...] = ()


WHOLE = Share()


@dataclass(frozen=True)
class ImageList:
    """The images of a test set from `first` on, in batches of `batch_size`.

    `sha256` covers everything that determines the model's input: keys, labels and encoded images, in order, and the
    size to which images are resized.
    """

    test: shards.ShardSet
    data: shards.DataConfig
    first: int
    batch_size: int
    images: tuple[Listed, ...]
    sha256: str

    @property
    def total(self) -> int:
        return len(self.images)

    def batches(self, skip: int = 0) -> Iterator[Batch]:
        """Yield images skip..total. Batch boundaries do not depend on `skip`, except for the first batch."""
        start = skip % self.batch_size
        for keys, images, labels in shards.eval_loader(
            self.test,
            self.data,
            batch_size=self.batch_size,
            first=self.first + skip - start,
            limit=self.total - skip + start,
        ):
            if start < len(keys):
                yield keys[start:], images[start:], labels[start:]
            start = 0


def image_list(data: shards.DataConfig, count: int | None, batch_size: int, first: int = 0) -> ImageList:
    """Return `count` test images from `first` on; all if there are fewer, or if it is None.

    Raises UserError if `data` has none there, or two with one key.
    """
    test = shards.find(data, "test")
    if first >= test.samples:
        raise UserError(f"first={first}: {data.root} has {test.samples} test images; lower it")
    warn_of_empty_classes(test, data.root)
    found: dict[str, int] = {}
    content = hashlib.sha256(f"{_read_as(data)}\n".encode())
    for sample in shards.eval_samples(test, data, first=first, limit=count):
        if sample.key in found:
            raise UserError(f"{data.root}: two samples have the key {sample.key}; write the shards again")
        found[sample.key] = sample.label
        content.update(f"{sample.label} {len(sample.image)} {sample.key}\n".encode())
        content.update(sample.image)
    images = tuple(Listed(key, label) for key, label in found.items())
    return ImageList(test, data, first, batch_size, images, content.hexdigest())


def _read_as(data: shards.DataConfig) -> str:
    """Return what determines the model's input besides keys, labels and files: the image's size, or the tokeniser."""
    if data.kind == TEXT:
        return f"{data.img_size} tokens of {sha256(data.tokens)}"
    return f"{data.channels} x {data.img_size}"


def digest(keys: Iterable[str]) -> str:
    """Return the sha256 of the list, which identifies results on the same images."""
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()


def class_names(data: shards.DataConfig) -> list[str] | None:
    """Return the manifest's names of the labels, if it names them all."""
    listing = listing_of(data)
    names = listing.class_names if listing else None
    return names if names and len(names) == data.num_classes else None
