"""Samples to batches. A faulty sample travels as a value to the end of the line, where it is judged.

B: images of a batch, C: channels, H, W: height, width.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from shards.augment import augmentation, mix
from shards.config import DataConfig
from shards.decode import Pixels, fit, pixels
from shards.tar import Entry, Sample, SampleError

View = Callable[[Sample], Pixels]


class Batch(NamedTuple):
    """What crosses from a loader process: uint8, a quarter of the shared memory of float32."""

    keys: list[str]
    images_BCHW: Tensor
    labels_B: Tensor
    faults: list[str]


def loaded(source: Iterable[Entry], num_classes: int) -> Iterator[Sample | SampleError]:
    for entry in source:
        try:
            yield entry.load(num_classes)
        except SampleError as error:
            yield error


def train_view(config: DataConfig, seed: int, epoch: int) -> View:
    augment = augmentation(config.augment, config.img_size)

    def view(sample: Sample) -> Pixels:
        return augment(pixels(sample.image, sample.where, config.channels), mix(seed, epoch, sample.key))

    return view


def eval_view(config: DataConfig) -> View:
    def view(sample: Sample) -> Pixels:
        return fit(pixels(sample.image, sample.where, config.channels), config.img_size)

    return view


def batches(items: Iterable[Sample | SampleError], view: View, size: int, *, patience: int) -> Iterator[Batch]:
    """Batches of `size` good samples, the last one perhaps smaller.

    Faults ride along with the batch they were met in; with patience 0 the first one is raised, and so is the
    last of more than `patience` in a row.
    """
    samples: list[Sample] = []
    images: list[Pixels] = []
    faults: list[str] = []
    in_a_row = 0
    for item in items:
        try:
            if isinstance(item, SampleError):
                raise item
            images.append(view(item))
        except SampleError as error:
            faults.append(str(error))
            in_a_row += 1
            if in_a_row > patience:
                raise
            continue
        samples.append(item)
        in_a_row = 0
        if len(images) == size:
            yield _collated(samples, images, faults)
            samples, images, faults = [], [], []
    if images:
        yield _collated(samples, images, faults)


def _collated(samples: list[Sample], images: list[Pixels], faults: list[str]) -> Batch:
    images_CHW = (np.require(image_HWC.transpose(2, 0, 1), requirements=["C", "W"]) for image_HWC in images)
    images_BCHW = default_collate([torch.from_numpy(image) for image in images_CHW])  # in shared memory at once
    labels_B = torch.tensor([sample.label for sample in samples], dtype=torch.int64)
    return Batch([sample.key for sample in samples], images_BCHW, labels_B, faults)
