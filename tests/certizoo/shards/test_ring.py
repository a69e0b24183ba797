"""Batches of loader processes lie in reused memory: each is read as it was written."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from certizoo.shards import DataConfig, find, train_loader
from certizoo.shards.ring import SLOTS, Ring, shared_bytes


def epoch(folder: Path, workers: int, batch_size: int = 10) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of an epoch, kept while later ones come."""
    data = DataConfig(
        "digits", str(folder), "digits-train-*.tar", "digits-test-*.tar", 10, 8, channels=1, workers=workers
    )
    return list(train_loader(find(data, "train"), data, batch_size=batch_size, epoch=0, seed=0))


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_that_are_kept_stay_as_they_were(digits: Path, workers: int) -> None:
    """There are many more batches than slots.

    Loader processes share an epoch: together they read the images of one.
    """
    alone, together = epoch(digits, 0), epoch(digits, workers)
    assert len(together) == len(alone) > SLOTS * workers

    def images(batches: list[tuple[Tensor, Tensor]]) -> set[tuple[bytes, int]]:
        rows = [
            (image_CHW.numpy().tobytes(), int(label))
            for images, labels in batches
            for image_CHW, label in zip(images, labels, strict=True)
        ]
        return set(rows)

    assert images(together) == images(alone)


def test_a_slot_that_was_used_again_is_seen() -> None:
    ring = Ring(1, 2, 1, 4, 4)
    assert ring.images_WSBCHW.nbytes == shared_bytes(1, 2, 1, 4, 4)
    pages = ring.pages(0)
    first = next(pages)
    assert first.slot is not None
    first.images_BCHW.fill_(7)
    assert torch.equal(ring.page(first.slot).images_BCHW, first.images_BCHW)
    list(islice(pages, SLOTS - 1))
    assert torch.equal(ring.page(first.slot).images_BCHW, first.images_BCHW)  # the others lie outside the ring
    next(pages)
    with pytest.raises(RuntimeError, match="is gone"):
        ring.page(first.slot)


def test_too_little_shared_memory_is_one_line_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Tensor) -> Tensor:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(Tensor, "share_memory_", refused)
    with pytest.raises(Exception, match=r"No space left.*fewer data.workers"):
        Ring(2, 2, 1, 4, 4)
