"""Resuming in the middle of an epoch of ImageNet's size: bytes read and seconds until the first batch.

1,331 shards of 1,000 samples are links to one shard of random JPEGs; the page cache holds it. Bytes are those that the
process read by system calls (rchar of /proc/self/io), with the manifest apart.

    python -m benchmarks.bench_resume [--shards 1331] [--side 331] [--ranks 8]
"""

import argparse
import io
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.record import record
from certizoo import shards
from certizoo.reading import Reading
from certizoo.shards import DataConfig, ShardSet
from certizoo.shards.format import manifest

SAMPLES, BATCH, CLASSES = 1000, 64, 1000
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1331)
    parser.add_argument("--side", type=int, default=331, help="of an image: ImageNet's mean size on disk")
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kilobytes = make(Path(folder), options.shards, options.side)
        results: dict[str, Figures] = {}
        data = DataConfig("big", folder, "big-train-*.tar", "big-train-*.tar", CLASSES, 224)
        with measured(results, "manifest"):
            found = shards.find(data, "train")
        for name, ranks in (("one_rank", 1), ("ranks", options.ranks)):
            steps = shards.steps_per_epoch(found, BATCH, ranks)
            for place, skip in (("start", 0), ("middle", steps // 2)):
                with measured(results, f"{name}_{place}"):
                    first(found, data, rank=ranks - 1, world_size=ranks, skip_batches=skip)
        before = [Reading(options.ranks, 8, BATCH, shards.steps_per_epoch(found, BATCH, options.ranks) // 2)]
        with measured(results, "other_ranks_middle"):
            first(found, data, rank=0, world_size=options.ranks // 2, before=before)
        about = {"samples": found.samples, "kilobytes": kilobytes, "batch": BATCH}
        record("resume_cpu", vars(options) | about | results)


def make(root: Path, count: int, side: int) -> float:
    """Write one shard of noise, and links and entries that repeat it; return the kilobytes of an image."""
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "JPEG", quality=90)
    (root / "noise.jpg").write_bytes(buffer.getvalue())
    path = shards.write(
        [(root / "noise.jpg", number % CLASSES) for number in range(SAMPLES)], root, name="big", split="train"
    )
    (info,) = manifest.parse(path.read_bytes(), "", general=False, fix="").files.values()
    names = [f"big-train-{number:06d}.tar" for number in range(count)]
    for name in names[1:]:
        (root / name).symlink_to(root / names[0])
    manifest.save(path, [replace(info, file=name) for name in names])
    return len(buffer.getvalue()) / 1e3


def first(found: ShardSet, data: DataConfig, **how: object) -> None:
    loader = shards.train_loader(found, data, batch_size=BATCH, epoch=0, seed=0, **how)  # type: ignore[arg-type]
    next(iter(loader))


@contextmanager
def measured(results: dict[str, Figures], name: str) -> Iterator[None]:
    before, start = read_bytes(), time.perf_counter()
    yield
    results[name] = {"seconds": time.perf_counter() - start, "megabytes": (read_bytes() - before) / 1e6}


def read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("\n", 1)[0].split()[1])


if __name__ == "__main__":
    main()
