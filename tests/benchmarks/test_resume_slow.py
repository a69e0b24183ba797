"""Resuming in the middle of 1.3 million samples: less than 10 MB and 2 s to the first batch, on any ranks."""

import time
from typing import Any

import pytest

from benchmarks.bench_resume import BATCH, CLASSES, make, read_bytes
from certizoo import shards
from certizoo.reading import Reading
from certizoo.shards import DataConfig, ShardSet

pytestmark = pytest.mark.slow
SHARDS = 1331  # of 1,000 samples each
BESIDE = 20_000  # bytes read of a sample at most, beside its image: headers, label, what a buffer reads ahead


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[ShardSet, DataConfig, int]:
    """Return the samples, their configuration and the bytes of an image."""
    folder = tmp_path_factory.mktemp("big")
    kilobytes = make(folder, SHARDS, 331)
    data = DataConfig("big", str(folder), "big-train-*.tar", "big-train-*.tar", CLASSES, 224)
    found = shards.find(data, "train")
    assert found.samples == 1_331_000
    return found, data, round(kilobytes * 1e3)


@pytest.mark.parametrize("ranks", [1, 8, "3 after 2"])
def test_the_first_batch_reads_its_own_bytes_only(big: tuple[ShardSet, DataConfig, int], ranks: Any) -> None:
    found, data, image = big
    steps = shards.steps_per_epoch(found, BATCH, 2 if isinstance(ranks, str) else ranks)
    where: dict[str, Any] = {"rank": 0, "world_size": ranks, "skip_batches": steps // 2}
    if isinstance(ranks, str):  # 2 were killed in the middle
        where = {"rank": 2, "world_size": 3, "before": [Reading(2, 1, BATCH, steps // 2)]}

    def first_batch() -> tuple[int, float]:
        before, begun = read_bytes(), time.process_time()
        next(iter(shards.train_loader(found, data, batch_size=BATCH, epoch=0, seed=0, **where)))
        return read_bytes() - before, time.process_time() - begun

    first_batch()  # imports
    (read, seconds), (again, _) = first_batch(), first_batch()
    assert BATCH * image < read <= BATCH * (image + BESIDE) < 10e6
    assert read == again
    assert seconds < 2
