"""Overhead of the training loader beyond decoding, in images per second of `shards.train_loader`.

The loader reads tar, shuffles, decodes JPEG, makes random resized crops and mirrors, collates, and transports batches
to the training process. It is compared with the least work that the same loader processes could do with the same JPEGs,
held in memory and with the pixels discarded:

    decode         Pillow's decoder and nothing else
    decode + view  the same views, decoded by the loader's own decoder, each drawn from the same seed
    loader         batches of bytes in the training process, as they are sent to a GPU, which converts them to float32
    floats         the same, converted to float32 by this CPU

All four alternate in one run and ratios are taken round by round. Times are processor times of this process and of its
loader processes, so that other programs do not count; wall times are given beside them. Shards are read `--copies`
times as one epoch, because starting loader processes takes seconds whatever the number of images.

    python -m benchmarks.bench_loader FOLDER [--train 'imagenet1k-sample-*.tar'] [--workers 0 1] [--rounds 9]
"""

import argparse
import io
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.record import record
from benchmarks.timing import processor_seconds
from certizoo import shards
from certizoo.memory import keep_freed_memory
from certizoo.shards import DataConfig, ShardSet
from certizoo.shards.batch import train_view
from certizoo.shards.format.tar import Sample
from certizoo.shards.plan import entries, segments

Seconds = tuple[float, float]  # processor time, wall time
EPOCH, SEED = 0, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--train", default="imagenet1k-sample-*.tar", help="names of the shards")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--augment", default="inception")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--workers", type=int, nargs="+", default=(0, 1))
    parser.add_argument("--interpolation", default="bilinear")
    parser.add_argument("--copies", type=int, default=4, help="copies of every shard in an epoch")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    keep_freed_memory()  # as a training on a CPU does
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(options.root), options.train, Path(folder), options.copies)
        compared(folder, options)


def copied(root: Path, pattern: str, folder: Path, copies: int) -> None:
    """Create this number of links to each shard."""
    for path in sorted(root.glob(pattern)):
        for copy in range(copies):
            (folder / f"{path.stem}-{copy:03d}.tar").symlink_to(path.resolve())


def compared(folder: str, options: argparse.Namespace) -> None:
    data = DataConfig(
        "imagenet",
        folder,
        "*.tar",
        "*.tar",
        1000,
        options.img_size,
        augment=options.augment,
        interpolation=options.interpolation,
    )
    found = shards.find(data, "train")
    samples = [entry.load(data.num_classes) for entry in entries(segments(found, np.arange(found.samples)))]
    results = {
        f"workers_{workers}": measured(replace(data, workers=workers), found, samples, options)
        for workers in options.workers
    }
    kilobytes = statistics.mean(len(sample.image) for sample in samples) / 1e3
    about = {"images": len(samples), "mean_kilobytes": kilobytes, "pillow": Image.__version__}
    chosen = {
        key: getattr(options, key)
        for key in ("train", "img_size", "augment", "interpolation", "batch", "copies", "rounds")
    }
    record("loader_cpu", chosen | about | results)


def measured(
    data: DataConfig, found: ShardSet, samples: list[Sample], options: argparse.Namespace
) -> dict[str, object]:
    view = train_view(data, SEED, EPOCH)
    ways: dict[str, Callable[[], Iterable[object]]] = {
        "loader": lambda: shards.train_loader(found, data, batch_size=options.batch, epoch=EPOCH, seed=SEED).received(),
        "floats": lambda: shards.train_loader(found, data, batch_size=options.batch, epoch=EPOCH, seed=SEED),
        "decode": lambda: bare(samples, decode_only, data.workers, options.batch),
        "decode_view": lambda: bare(samples, view, data.workers, options.batch),
    }
    turns: list[dict[str, Seconds]] = []
    for turn in range(options.rounds + 1):
        order = [*ways][turn % len(ways) :] + [*ways][: turn % len(ways)]
        turns.append({name: seconds(ways[name]) for name in order})
    turns = turns[1:]  # the first warms up
    rates = {name: len(samples) / statistics.median(turn[name][0] for turn in turns) for name in ways}
    walls = {name: len(samples) / statistics.median(turn[name][1] for turn in turns) for name in ways}
    return {
        "images_per_cpu_second": rates,
        "images_per_wall_second": walls,
        "loader_over_decode_view": quartiles(turn["decode_view"][0] / turn["loader"][0] for turn in turns),
        "loader_over_decode": quartiles(turn["decode"][0] / turn["loader"][0] for turn in turns),
        "floats_over_decode": quartiles(turn["decode"][0] / turn["floats"][0] for turn in turns),
        "decode_view_over_decode": quartiles(turn["decode"][0] / turn["decode_view"][0] for turn in turns),
    }


def quartiles(ratios: Iterable[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": middle, "low": low, "high": high}


def seconds(make: Callable[[], Iterable[object]]) -> Seconds:
    """Time one epoch, loader processes included: all of them have ended."""
    whose = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    cpu, wall = processor_seconds(*whose), time.perf_counter()
    for _ in make():
        pass
    return processor_seconds(*whose) - cpu, time.perf_counter() - wall


def decode_only(sample: Sample) -> None:
    Image.open(io.BytesIO(sample.image)).load()


@dataclass(eq=False)
class Bare(IterableDataset):
    """A stream that applies `act` to every sample; the loader process sends one number per batch."""

    samples: list[Sample]
    act: Callable[[Sample], object]
    batch: int

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for start in range(worker * self.batch, len(self.samples), workers * self.batch):
            for sample in self.samples[start : start + self.batch]:
                self.act(sample)
            yield start


def bare(samples: list[Sample], act: Callable[[Sample], object], workers: int, batch: int) -> Iterable[object]:
    return DataLoader(Bare(samples, act, batch), batch_size=None, num_workers=workers)


if __name__ == "__main__":
    main()
