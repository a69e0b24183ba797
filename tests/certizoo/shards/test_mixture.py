"""Mixtures and repeated augmentation: shares, coverage, and exact resumes on any number of ranks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
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
from certizoo.shards.format.config import from_elsewhere
from certizoo.shards.plan import epoch_line
from certizoo.shards.ring import fresh_pages

COUNTS = {"real": 61, "made": 40, "few": 5}
SHARES = {"real": 0.3, "made": 0.6, "few": 0.1}  # an epoch: 61, 122 and 20 samples


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    random = np.random.default_rng(0)
    for name, count in COUNTS.items():
        images = [(random.integers(0, 256, (8, 8, 3), dtype=np.uint8), place % 3) for place in range(count)]
        place = folder / "elsewhere" if name == "few" else folder
        shards.write(images, place, name=name, split="train", per_shard=17)
    return folder


@pytest.fixture(scope="module")
def data(root: Path) -> DataConfig:
    mix = {"made": SHARES["made"], "real": SHARES["real"], "elsewhere/few": SHARES["few"]}
    return DataConfig("real", str(root), "real-train-*.tar", "real-test-*.tar", 3, 8, mix=mix)


@pytest.fixture(scope="module")
def mixture(data: DataConfig) -> ShardSet:
    return shards.find(data, "train")


def read(mixture: ShardSet, data: DataConfig, workers: int = 1, **how: Any) -> list[list[str]]:
    return [batch.keys for batch in batches(mixture, data, workers, **how)]


def batches(mixture: ShardSet, data: DataConfig, workers: int, **how: Any) -> list[Batch]:
    stream = shards.train_loader(mixture, data, **{"epoch": 0, "seed": 0, **how}).stream
    streams = [list(stream.read(worker, workers, fresh_pages(*stream.page))) for worker in range(workers)]
    steps = sum(map(len, streams))
    return [streams[step % workers][step // workers] for step in range(steps)]


def by_set(keys: Sequence[str]) -> dict[str, int]:
    return dict(Counter(key.partition("-")[0] for key in keys))


def test_an_epoch_is_one_pass_through_the_first_set_with_the_others_in_their_shares(mixture: ShardSet) -> None:
    assert mixture.quotas == [61, 122, 20]
    assert shards.steps_per_epoch(mixture, 16, 2) == 7
    assert mixture.histogram == (21 + 14 + 2, 20 + 13 + 2, 20 + 13 + 1)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 99), first=st.integers(0, 50), epochs=st.integers(1, 8), repeats=st.integers(1, 4))
def test_coverage_and_shares(mixture: ShardSet, seed: int, first: int, epochs: int, repeats: int) -> None:
    """No sample of a set is drawn more than one pass ahead of another, and each stretch of a line has the shares."""
    lines = [epoch_line(mixture, seed, epoch, repeats) for epoch in range(first, first + epochs)]
    begin, total = 0, sum(mixture.quotas)
    for counts, quota in zip(mixture.counts_by_set, mixture.quotas, strict=True):
        size = sum(counts)
        times = np.bincount(np.concatenate(lines) % mixture.samples, minlength=mixture.samples)[begin : begin + size]
        assert times.sum() == quota * epochs
        if repeats == 1:
            assert times.max() - times.min() <= (1 if epochs * quota <= size or first == 0 else 2)
        for line in lines:
            own = (line % mixture.samples >= begin) & (line % mixture.samples < begin + size)
            ahead = np.cumsum(own) - quota / total * np.arange(1, total + 1)
            assert np.abs(ahead).max() <= len(mixture.sets) / 2
            assert len(np.unique(line[own])) == quota  # a sample that is drawn again has another view
        begin += size


def test_a_set_goes_on_where_the_epoch_before_left_it(mixture: ShardSet) -> None:
    """Twenty epochs of the small set's passes contain each of its samples equally often."""
    lines = [epoch_line(mixture, 3, epoch) % mixture.samples for epoch in range(20)]
    drawn = np.bincount(np.concatenate(lines), minlength=mixture.samples)
    assert set(drawn[:61]) == {20}
    assert set(drawn[61:101]) == {61}
    assert set(drawn[101:]) == {80}


def test_repeats_are_views_of_one_image_and_epochs_cover_the_set_in_turn(root: Path, data: DataConfig) -> None:
    alone = replace(data, mix=None, repeats=3, augment="flip_crop")
    found = shards.find(alone, "train")
    lines = [epoch_line(found, 0, epoch, 3) for epoch in range(3)]
    assert [len(line) for line in lines] == [61] * 3
    assert set(np.concatenate(lines) % 61) == set(range(61))  # 21 images an epoch
    images: dict[str, list[torch.Tensor]] = {}
    stream = shards.train_loader(found, alone, batch_size=61, epoch=0, seed=0).stream
    (batch,) = stream.read(0, 1, fresh_pages(*stream.page))
    for key, image in zip(batch.keys, batch.images_BCHW, strict=True):
        images.setdefault(key, []).append(image)
    assert sorted(map(len, images.values())) == [1] + [3] * 20
    different = [len({view.numpy().tobytes() for view in views}) for views in images.values()]
    assert sum(different) > 50  # of 61 draws; a few of the 162 views of an image coincide


@settings(deadline=None, max_examples=8)
@given(
    ranks=st.lists(st.sampled_from((1, 2, 3, 4)), min_size=1, max_size=3),
    workers=st.integers(1, 3),
    repeats=st.sampled_from((1, 3)),
    draws=st.data(),
)
def test_any_ranks_go_on_with_what_others_left(
    mixture: ShardSet, data: DataConfig, ranks: list[int], workers: int, repeats: int, draws: st.DataObject
) -> None:
    """Ranks change within an epoch; together they draw the epoch's line, each sample as often as the line does."""
    batch, epoch, data = 12, 4, replace(data, repeats=repeats)
    steps = shards.steps_per_epoch(mixture, batch)
    before: list[Reading] = []
    seen: list[str] = []
    for place, world in enumerate(ranks, start=1):
        left = steps - sum(reading.drawn for reading in before) // batch
        done = left if place == len(ranks) else draws.draw(st.integers(0, left))
        how: dict[str, Any] = {"batch_size": batch // world, "epoch": epoch, "world_size": world, "per_epoch": steps}
        for rank in range(world):
            whole = read(mixture, data, workers, rank=rank, before=before, **how)
            assert read(mixture, data, workers, rank=rank, before=before, skip_batches=done, **how) == whole[done:]
            seen += [key for keys in whole[:done] for key in keys]
        before = [*before, Reading(world, workers, batch // world, done)]
    line = epoch_line(mixture, 0, epoch, repeats)
    assert len(seen) == steps * batch
    assert len(set(seen)) == len(np.unique(line % mixture.samples))
    quotas = dict(zip(("real", "made", "few"), mixture.quotas, strict=True))
    assert all(quotas[name] <= count <= quotas[name] + batch for name, count in by_set(seen).items())


def test_loader_processes_read_a_mixture_as_one_process_does(mixture: ShardSet, data: DataConfig) -> None:
    how: dict[str, Any] = {"batch_size": 29, "epoch": 1, "seed": 2}
    apart = list(shards.train_loader(mixture, replace(data, augment="flip", workers=2), **how))
    here = batches(mixture, replace(data, augment="flip"), 2, **how)
    assert [labels.tolist() for _, labels in apart] == [batch.labels for batch in here]
    assert [len(batch.labels) for batch in here] == [29] * 7


def test_other_shares_or_sets_are_another_run(data: DataConfig, mixture: ShardSet) -> None:
    other = replace(data, mix={"real": 0.4, "made": 0.6})
    digests = {shards.find(each, "train").digest for each in (data, other, replace(data, mix=None))}
    assert len(digests) == 3
    assert mixture.digest in digests


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"made": 1.0}, "data.mix has no share of real"),
        ({"real": 0.5, "made": 0.6}, "sum to 1.1"),
        ({"real": 0.5, "made": -0.5}, "data.mix|mix="),
        ({"real": 0.5, "a/b*": 0.5}, "not a name"),
    ],
)
def test_wrong_shares_are_one_line(data: DataConfig, mix: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(data, mix=mix)


def test_a_set_that_is_missing_is_named(data: DataConfig) -> None:
    with pytest.raises(UserError, match="none-train-"):
        shards.find(replace(data, mix={"real": 0.5, "none": 0.5}), "train")


def test_a_file_from_elsewhere_names_no_further_sets(root: Path) -> None:
    said = {"name": "real", "root": str(root), "train": "*", "test": "*", "num_classes": 3, "img_size": 8}
    mix = {"real": 0.5, "pipe:touch owned/made": 0.5}
    assert from_elsewhere(said | {"mix": mix}, "config.yaml", trusted=True).mix is None
