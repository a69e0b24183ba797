"""Collect samples into batches. A faulty sample is passed on as a value and judged at the end of the pipeline.

B: images of a batch, C: channels, H, W: height, width; T: tokens, of which text has two bytes each.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from certizoo.images import Pixels
from certizoo.shards.format import tokens
from certizoo.shards.format.config import TEXT, DataConfig
from certizoo.shards.format.tar import MEND_SAMPLE, Entry, Sample, SampleError
from certizoo.shards.ring import Page
from certizoo.shards.views.augment import augmentation, erasing, mix
from certizoo.shards.views.fit import fit
from certizoo.shards.views.kernels import write_planes

View = Callable[[Sample], Pixels]
Spare = Callable[[], Iterable[Sample | SampleError]]


class Batch(NamedTuple):
    """Samples whose images are the first entries of a page: (B, C, H, W), or (B, T, 2) of text, uint8."""

    keys: list[str]
    labels: list[int]
    faults: list[str]
    page: Page

    @property
    def images_BCHW(self) -> Tensor:
        return self.page.images_BCHW[: len(self.keys)]


def loaded(source: Iterable[Entry], num_classes: int) -> Iterator[Sample | SampleError]:
    for entry in source:
        try:
            yield entry.load(num_classes)
        except SampleError as error:
            yield error


def train_view(config: DataConfig, seed: int, epoch: int) -> View:
    if config.kind == TEXT:
        return text_view(config)
    augment = augmentation(config.augment, config.img_size, config.interpolation)
    if config.erase:
        augment = erasing(augment, config.erase)

    def view(sample: Sample) -> Pixels:
        draw = [sample.key, sample.copy] if sample.copy else [sample.key]
        return augment(sample.pixels(config.channels), mix(seed, epoch, *draw))

    return view


def eval_view(config: DataConfig) -> View:
    if config.kind == TEXT:
        return text_view(config)

    def view(sample: Sample) -> Pixels:
        return fit(sample.pixels(config.channels), config.img_size)

    return view


def text_view(config: DataConfig) -> View:
    """Return the numbers of the first `img_size` tokens, as pairs of bytes; no augmentation."""
    tokeniser = tokens.load(config.tokens)

    def view(sample: Sample) -> Pixels:
        numbers = tokeniser.numbers(sample.text(), config.img_size)
        if not numbers:
            raise SampleError(f"{sample.where} has no words; {MEND_SAMPLE}")
        return tokens.bytes_of(numbers, config.img_size)

    return view


def _put(seen: Pixels, out: Pixels) -> None:
    """Copy an image, whose channels come last, to planes; or tokens as they are."""
    if seen.ndim == 3:
        write_planes(seen, out)
    else:
        out[...] = seen


def batches(
    items: Iterable[Sample | SampleError], view: View, pages: Iterator[Page], spare: Spare | None
) -> Iterator[Batch]:
    """Iterate over batches, each filling a page, the last one perhaps smaller.

    Without `spare` the first fault is raised. Otherwise good samples of a batch replace its faulty ones, or if it has
    none, the first good one of `spare` does: the n-th batch does not depend on the faults before it.
    """
    batch: Batch | None = None
    for item in items:
        batch = batch or Batch([], [], [], next(pages))
        try:
            _add(batch, item, view)
        except SampleError as error:
            if spare is None:
                raise
            batch.faults.append(str(error))
        if len(batch.keys) + len(batch.faults) == len(batch.page.images_BCHW):
            yield _completed(batch, view, spare)
            batch = None
    if batch:
        yield batch


def _add(batch: Batch, item: Sample | SampleError, view: View) -> None:
    if isinstance(item, SampleError):
        raise item
    _put(view(item), batch.page.images_BCHW[len(batch.keys)].numpy())
    batch.keys.append(item.key)
    batch.labels.append(item.label)


def _completed(batch: Batch, view: View, spare: Spare | None) -> Batch:
    for item in spare() if spare and not batch.keys else ():
        with suppress(SampleError):
            _add(batch, item, view)
            break
    if not batch.keys:
        raise SampleError(batch.faults[-1])
    images_BCHW, good = batch.page.images_BCHW, len(batch.keys)
    for place in range(good, len(images_BCHW)):
        images_BCHW[place] = images_BCHW[place - good]
        batch.keys.append(batch.keys[place - good])
        batch.labels.append(batch.labels[place - good])
    return batch
