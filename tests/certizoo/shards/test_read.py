"""The loaders give every sample once and equal steps on every rank, and a resumed epoch continues exactly."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from certizoo import UserError, shards
from certizoo.reading import Reading
from certizoo.shards import DataConfig, ShardSet
from certizoo.shards.batch import Batch
from certizoo.shards.plan import segments, share
from certizoo.shards.read import EvalBatches, TrainBatches
from certizoo.shards.ring import Page, fresh_pages
from certizoo.shards.streams import EvalStream
from certizoo.shards.views.augment import augmentation, flip_crop, mix

SIZE = 8
ROOT = Path(__file__).parents[3]


def numbered(count: int) -> list[tuple[np.ndarray, int]]:
    """Make images whose first two pixels spell their number, so that a batch shows its samples."""
    images = np.random.default_rng(0).integers(0, 256, (count, SIZE, SIZE, 3), dtype=np.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = np.arange(count) // 256, np.arange(count) % 256
    return [(image, number % 7) for number, image in enumerate(images)]


def numbers(images_BCHW: torch.Tensor) -> list[int]:
    pixels = (images_BCHW[:, :2, 0, 0] * 255).round().long()
    return (pixels[:, 0] * 256 + pixels[:, 1]).tolist()


def config(root: Path, **changes: object) -> DataConfig:
    base = DataConfig("toy", str(root), "toy-train-*.tar", "toy-train-*.tar", num_classes=7, img_size=SIZE)
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    shards.write(numbered(301), folder, name="toy", split="train", per_shard=47)
    return folder


@pytest.fixture(scope="module")
def toy(root: Path) -> ShardSet:
    return shards.find(config(root), "train")


def trained(toy: ShardSet, data: DataConfig, batch_size: int = 8, **how: Any) -> list[list[int]]:
    how = {"epoch": 0, "seed": 0, **how}
    return [numbers(images) for images, _ in shards.train_loader(toy, data, batch_size=batch_size, **how)]


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (3, 0), (8, 0), (1, 2), (3, 2)])
def test_evaluation_reads_each_sample_once_in_file_order(
    toy: ShardSet, root: Path, world_size: int, workers: int
) -> None:
    data = config(root, workers=workers)
    keys: list[str] = []
    for rank in range(world_size):
        loader = shards.eval_loader(toy, data, batch_size=16, rank=rank, world_size=world_size)
        batches = list(loader)
        assert len(batches) == len(loader)
        keys += [key for names, _, _ in batches for key in names]
    assert keys == [f"toy-train-{place:08d}" for place in range(301)]


@pytest.mark.parametrize(("first", "limit", "asked"), [(40, 30, 30), (250, None, 51), (290, 30, 11), (301, 5, 0)])
def test_a_range_of_the_list_for_any_number_of_ranks(
    toy: ShardSet, root: Path, first: int, limit: int | None, asked: int
) -> None:
    for world_size in (1, 3):
        keys: list[str] = []
        for rank in range(world_size):
            loader = shards.eval_loader(
                toy, config(root), batch_size=8, first=first, limit=limit, rank=rank, world_size=world_size
            )
            batches = list(loader)
            assert len(batches) == len(loader)
            keys += [key for names, _, _ in batches for key in names]
        assert keys == [f"toy-train-{place:08d}" for place in range(first, first + asked)]


def test_limit_is_the_head_of_the_list_for_any_number_of_ranks(toy: ShardSet, root: Path) -> None:
    for world_size in (1, 2, 5):
        keys = [
            key
            for rank in range(world_size)
            for names, _, _ in shards.eval_loader(
                toy, config(root), batch_size=4, limit=50, rank=rank, world_size=world_size
            )
            for key in names
        ]
        assert keys == [f"toy-train-{place:08d}" for place in range(50)]


def in_turn(loader: TrainBatches, workers: int) -> list[list[str]]:
    """Return the keys of each batch, taking the workers in turn as torch's loader does."""
    streams = [list(loader.stream.read(worker, workers, fresh_pages(*loader.stream.page))) for worker in range(workers)]
    return [batch.keys for turn in zip_longest(*streams) for batch in turn if batch is not None]


@settings(deadline=None, max_examples=40)
@given(world_size=st.integers(1, 12), workers=st.integers(1, 5), batch_size=st.integers(1, 40), skip=st.integers(0, 9))
def test_training_plan(toy: ShardSet, root: Path, world_size: int, workers: int, batch_size: int, skip: int) -> None:
    """Equal steps, every sample on some rank, exact skips, for any ranks, workers and batch (one process)."""
    steps = shards.steps_per_epoch(toy, batch_size, world_size)
    seen: set[str] = set()
    for rank in range(world_size):
        how: dict[str, Any] = {"batch_size": batch_size, "epoch": 0, "seed": 0, "rank": rank, "world_size": world_size}
        whole = in_turn(shards.train_loader(toy, config(root), **how), workers)
        assert [len(keys) for keys in whole] == [batch_size] * steps
        seen |= {key for keys in whole for key in keys}
        assert in_turn(shards.train_loader(toy, config(root), skip_batches=skip, **how), workers) == whole[skip:]
    assert len(seen) == toy.samples


@settings(deadline=None, max_examples=20)
@given(
    batch=st.sampled_from((1, 12, 24, 120)),
    ranks=st.lists(st.sampled_from((1, 2, 3, 4, 6, 12)), min_size=2, max_size=4),
    workers=st.integers(1, 4),
    data=st.data(),
)
def test_any_ranks_go_on_with_what_others_left(
    toy: ShardSet, root: Path, batch: int, ranks: list[int], workers: int, data: st.DataObject
) -> None:
    """Ranks change within an epoch, any number of times; they read every sample, in the same number of steps."""
    steps = shards.steps_per_epoch(toy, batch)
    ranks = [each for each in ranks if batch % each == 0] or [1]
    before: list[Reading] = []
    seen: list[str] = []
    for place, world_size in enumerate(ranks, start=1):
        left = steps - sum(reading.drawn for reading in before) // batch
        done = left if place == len(ranks) else data.draw(st.integers(0, left))
        own = batch // world_size
        how: dict[str, Any] = {"batch_size": own, "epoch": 2, "seed": 0, "before": before, "per_epoch": steps}
        for rank in range(world_size):
            loader = shards.train_loader(toy, config(root), rank=rank, world_size=world_size, **how)
            assert len(loader) == left
            whole = in_turn(loader, workers)
            rest = shards.train_loader(toy, config(root), rank=rank, world_size=world_size, skip_batches=done, **how)
            assert in_turn(rest, workers) == whole[done:]
            seen += [key for keys in whole[:done] for key in keys]
        before = [*before, Reading(world_size, workers, own, done)]
    assert len(seen) == steps * batch
    assert len(set(seen)) == toy.samples


@settings(deadline=None, max_examples=20)
@given(
    workers=st.integers(1, 5),
    batch_size=st.integers(1, 40),
    skip=st.integers(0, 9),
    epochs=st.integers(1, 4),
    more=st.integers(0, 3),
)
def test_epochs_together_are_those_one_by_one(
    toy: ShardSet, root: Path, workers: int, batch_size: int, skip: int, epochs: int, more: int
) -> None:
    """An epoch may begin at any loader's turn, and have more batches than its samples fill."""
    each = shards.steps_per_epoch(toy, batch_size, 2) + more
    how: dict[str, Any] = {"batch_size": batch_size, "seed": 5, "rank": 1, "world_size": 2}
    one_by_one = [
        keys
        for epoch in range(3, 3 + epochs)
        for keys in in_turn(shards.train_loader(toy, config(root), epoch=epoch, per_epoch=each, **how), workers)
    ]
    skip = min(skip, each - 1)  # a run resumes within an epoch
    together = shards.train_loader(toy, config(root), epoch=3, epochs=epochs, per_epoch=each, skip_batches=skip, **how)
    assert in_turn(together, workers) == one_by_one[skip:]
    assert len(together) == len(one_by_one) - skip


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_loader_processes_go_on_to_the_next_epoch(toy: ShardSet, root: Path, workers: int) -> None:
    data = config(root, augment="flip_crop", workers=workers)
    how: dict[str, Any] = {"batch_size": 43, "seed": 5}
    together = list(shards.train_loader(toy, data, epoch=0, epochs=3, skip_batches=2, **how))
    one_by_one = [batch for epoch in range(3) for batch in shards.train_loader(toy, data, epoch=epoch, **how)]
    for (images, labels), (images_again, labels_again) in zip(together, one_by_one[2:], strict=True):
        assert torch.equal(images, images_again)
        assert torch.equal(labels, labels_again)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_cover_the_epoch_in_equal_steps(toy: ShardSet, root: Path, world_size: int, workers: int) -> None:
    epochs = [
        trained(toy, config(root, workers=workers), rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    steps = shards.steps_per_epoch(toy, 8, world_size)
    assert [len(batches) for batches in epochs] == [steps] * world_size
    assert {number for batches in epochs for batch in batches for number in batch} == set(range(301))


@pytest.mark.parametrize("skip", [0, 1, 7, 18, 19, 25])
def test_skipping_goes_on_exactly(toy: ShardSet, root: Path, skip: int) -> None:
    data = config(root, augment="flip_crop")
    for workers in (0, 2) if skip in (1, 7) else (0,):
        how: dict[str, Any] = {"batch_size": 8, "epoch": 3, "seed": 5, "rank": 1, "world_size": 2}
        chosen = replace(data, workers=workers)
        whole = list(shards.train_loader(toy, chosen, **how))
        rest = list(shards.train_loader(toy, chosen, skip_batches=skip, **how))
        assert len(rest) == max(len(whole) - skip, 0)
        for (images, labels), (images_again, labels_again) in zip(whole[skip:], rest, strict=True):
            assert torch.equal(images, images_again)
            assert torch.equal(labels, labels_again)


def test_seed_reproduces_and_epoch_and_seed_change_the_order(toy: ShardSet, root: Path) -> None:
    data = config(root)
    first = trained(toy, data)
    assert first == trained(toy, data)
    assert first != trained(toy, data, epoch=1)
    assert first != trained(toy, data, seed=1)
    assert trained(toy, data, seed=0, epoch=1) != trained(toy, data, seed=1, epoch=0)


@pytest.mark.parametrize("augment", ["none", "flip_crop", "flip_crop_jitter", "inception", "randaug"])
def test_augmentation_is_of_seed_epoch_and_key_and_leaves_global_generators(
    toy: ShardSet, root: Path, augment: str
) -> None:
    data = config(root, augment=augment)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())  # type: ignore[index]
    runs = [list(shards.train_loader(toy, data, batch_size=32, epoch=e, seed=0)) for e in (0, 0, 1)]
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert all(torch.equal(a[0], b[0]) for a, b in zip(runs[0], runs[1], strict=True))
    for images, labels in runs[0]:
        assert images.shape == (32, 3, SIZE, SIZE)
        assert images.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert 0 <= images.min() <= images.max() <= 1
    pools = [torch.cat([images for images, _ in run]).flatten(1).sum(1).sort().values for run in runs]
    assert augment == "none" or not torch.equal(pools[0], pools[2])  # another epoch has other views


def test_jitter_is_flip_crop_of_other_colours() -> None:
    """A grey image stays grey and shifted-in pixels black; brightness changes by at most a factor of 1 +- 0.4."""
    image = np.full((16, 16, 3), 100, np.uint8)
    views = [augmentation("flip_crop_jitter", 16)(image, mix("seed", k)) for k in range(200)]
    assert all((view.std(-1) == 0).all() for view in views)
    levels = np.array([view.max() for view in views])
    assert 59 <= levels.min() < 75
    assert 125 < levels.max() <= 141
    for k, view in enumerate(views):
        assert np.array_equal(view > 0, flip_crop(image, mix("seed", k)) > 0)


def test_flip_mirrors_half_of_the_images_and_changes_nothing_else(toy: ShardSet, root: Path) -> None:
    def images(augment: str) -> torch.Tensor:
        batches = shards.train_loader(toy, config(root, augment=augment), batch_size=43, epoch=0, seed=0)
        return torch.cat([images for images, _ in batches])

    plain, seen = images("none"), images("flip")
    kept, mirrored = ((seen == other).flatten(1).all(1) for other in (plain, plain.flip(-1)))
    assert (kept ^ mirrored).all()
    assert 0.35 < float(mirrored.float().mean()) < 0.65


def test_a_view_does_not_depend_on_workers(toy: ShardSet, root: Path) -> None:
    data = config(root, augment="inception")
    views = [
        torch.cat([images for images, _ in shards.train_loader(toy, d, batch_size=43, epoch=0, seed=0)])
        for d in (data, replace(data, workers=2))
    ]
    sums = [{tuple(image.flatten().tolist()) for image in view} for view in views]
    assert sums[0] == sums[1]


def test_labels_follow_their_images(toy: ShardSet, root: Path) -> None:
    for images, labels in shards.train_loader(toy, config(root), batch_size=16, epoch=0, seed=0):
        assert [number % 7 for number in numbers(images)] == labels.tolist()


@settings(deadline=None)
@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=6), parts=st.integers(1, 7))
def test_shares_tile_the_line(counts: list[int], parts: int) -> None:
    total = sum(counts)
    paths = [Path(str(place)) for place in range(len(counts))]
    line = [(path, place) for path, count in zip(paths, counts, strict=True) for place in range(count)]
    read: list[tuple[Any, int]] = []
    shard_set = ShardSet(tuple(paths), tuple(counts), 2, (), "")
    for part in range(parts):
        start, stop = total * part // parts, total * (part + 1) // parts
        read += [(s.path, place) for s in segments(shard_set, np.arange(start, stop)) for place in s.wanted]
        low, high = share(0, total, part, part + 1, parts)
        assert high > low  # every worker has samples, though some share them
    assert read == line


def test_more_ranks_than_samples_still_make_equal_steps(tmp_path: Path) -> None:
    shards.write(numbered(3), tmp_path, name="toy", split="train")
    data = config(tmp_path)
    toy = shards.find(data, "train")
    assert [len(trained(toy, data, rank=rank, world_size=5)) for rank in range(5)] == [1] * 5


class Killed(EvalStream):
    """A loader process that ends as if the kernel killed one for memory."""

    def read(self, worker: int, workers: int, pages: Iterator[Page]) -> Iterator[Batch]:
        os.kill(os.getpid(), signal.SIGKILL)
        return iter(())


HEIR = """
import gc, os, weakref
from torch.utils.data import DataLoader
from certizoo.shards.read import _started

class Session: ...

gc.disable()
session = Session()
session.itself = session
weakref.finalize(session, lambda: print("closed by", "the rank" if os.getpid() == rank else "a loader", flush=True))
rank = os.getpid()
del session
list(_started(DataLoader([0], num_workers=1, collate_fn=lambda items: gc.collect())))
print("loaded", flush=True)
gc.collect()
"""

KEPT = """
import sys
from certizoo.shards import find, train_loader
from tests.tools.remote_shards import config

data = config(sys.argv[1], workers=2)
kept = sys.modules["kept"] = iter(train_loader(find(data, "train"), data, batch_size=4, epoch=0, seed=0))
next(kept)
print("read", flush=True)
"""


@pytest.mark.slow
def test_a_loader_process_tidies_nothing_up_that_the_rank_had() -> None:
    """Closing fsspec's sessions there would wait for the rank's event loop, for up to a minute."""
    done = subprocess.run([sys.executable, "-c", HEIR], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "loaded\nclosed by the rank\n"), done.stderr


def test_a_process_ends_beside_a_loader_that_it_never_closed(root: Path) -> None:
    """A training on a GPU finished its work and never returned, as its loader processes ignored their end."""
    command = [sys.executable, "-W", "ignore:This DataLoader will create", "-c", KEPT, str(root)]  # on a single core
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "read\n", "")


def test_a_loader_process_that_dies_is_one_line_and_no_hang(toy: ShardSet, root: Path) -> None:
    stream = Killed(toy, config(root, workers=2), 8, 0, 1, 0, toy.samples)
    with pytest.raises(UserError, match="loader process of toy died"):
        list(EvalBatches(stream, 4))
