"""Cost of a certificate: seconds per image for all eps of the grid, and for the certified radius in addition.

It measures the adjoint certificate for three layers of width 128 and 4 or 16 tokens, and `best` for cert_vit_c10.
Processes with one thread each share the images, as in `certify.rows.workers`; each measures the weights once, which is
not counted. On a busy machine use cpu_all_eps and cpu_radius_besides, the processor time of all processes per image,
divided by their number. The eps are tried from the largest down; an image that passed one is not tried at smaller ones.
LoFAST reports 0.055 s per image for one eps, 4 tokens.

    python -m benchmarks.bench_certify                                # random weights, labels as predicted: all correct
    python -m benchmarks.bench_certify --handover RUN/handover ... --shards FOLDER   # trained models and test images
    python -m benchmarks.bench_certify --method best --handover zoo/weights/cert_vit_c10 --shards FOLDER
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zoo
from benchmarks.record import record
from certify.api import certifier, radius_of
from certify.methods import METHODS
from certify.shared.certificate import Analysis
from certizoo import shards
from zoo.layers.fold import folded

EPS = (0.02, 0.05, 0.1, 36 / 255, 0.25, 72 / 255)
TARGETS = {("adjoint", 4): 0.02, ("adjoint", 16): 0.1}  # seconds per image on 2 cores, all eps


@dataclass(frozen=True)
class Given:
    """The settings of a measurement."""

    method: str
    batch: int
    workers: int


def all_eps(analysis: Analysis) -> None:
    """Decide every image and eps; a larger certified ball decides the smaller ones in it."""
    passed_B = torch.zeros_like(analysis.clean.correct_B)
    for eps in sorted(EPS, reverse=True):
        passed_B = passed_B | analysis.at(torch.where(passed_B, 0.0, eps)).certified_B


def share(model: Any, images_BCHW: Tensor, labels_B: Tensor, given: Given, barrier: Any, found: Any) -> None:
    """Measure the cost of one process's images."""
    torch.set_num_threads(1)
    prover = certifier(model, given.method)
    prover.analyse(images_BCHW[:2], labels_B[:2]).at(0.1)
    barrier.wait()
    spent = torch.zeros(4, dtype=torch.float64)  # seconds and processor time of all eps, and of the radius
    for images, labels in zip(images_BCHW.split(given.batch), labels_B.split(given.batch), strict=True):
        start = clocks()
        analysis = prover.analyse(images, labels)
        all_eps(analysis)
        between = clocks()
        radius_of(analysis)
        spent += torch.cat([between - start, clocks() - between])
    found.put(spent.tolist())


def clocks() -> Tensor:
    """Return wall seconds and processor seconds of this process."""
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


def measure(model: Any, images_BCHW: Tensor, labels_B: Tensor, given: Given) -> dict[str, float]:
    """Return the seconds of the slowest process and the sum of processor time."""
    context = get_context("spawn")
    barrier, found = context.Barrier(given.workers), context.Queue()
    shares = zip(images_BCHW.tensor_split(given.workers), labels_B.tensor_split(given.workers), strict=True)
    processes = [context.Process(target=share, args=(folded(model), *part, given, barrier, found)) for part in shares]
    for process in processes:
        process.start()
    eps, cpu_eps, radius, cpu_radius = zip(*(found.get() for _ in processes), strict=True)
    for process in processes:
        process.join()
    with torch.no_grad():
        correct = float((model(images_BCHW).argmax(-1) == labels_B).float().mean())
    count = len(labels_B)
    return {
        "images": count,
        "correct": correct,
        "seconds_all_eps": max(eps) / count,
        "seconds_radius_besides": max(radius) / count,
        "cpu_all_eps": sum(cpu_eps) / count,
        "cpu_radius_besides": sum(cpu_radius) / count,
    }


def handed_over(handover: Path, folder: Path, count: int) -> tuple[str, Any, Tensor, Tensor]:
    """Return a trained model's name and data size, the model, and the first test images and labels in this folder."""
    model, config = zoo.handover.load(handover)
    data = shards.DataConfig(**config["data"] | {"root": str(folder)})
    _, images, labels = next(iter(shards.eval_loader(shards.find(data, "test"), data, batch_size=count, limit=count)))
    return config["model"]["name"], model.eval(), images, labels


def subjects(arguments: argparse.Namespace) -> Iterator[tuple[str, int, Any, Tensor, Tensor]]:
    """Iterate over (name, tokens, model, images, labels)."""
    model: Any
    for handover in arguments.handover:
        name, model, images, labels = handed_over(handover, arguments.shards, arguments.images)
        tokens = model.patch_embed.num_patches
        yield f"{name}, {tokens} tokens, trained", tokens, model, images, labels
    for patch in () if arguments.handover else (16, 8):
        torch.manual_seed(0)
        model = zoo.create_model("lofast_vit_c10_smooth", patch_size=patch).eval()
        images = torch.rand(arguments.images, 3, 32, 32)
        with torch.no_grad():
            labels = model(images).argmax(-1)
        tokens = model.patch_embed.num_patches
        yield f"lofast_vit_c10_smooth, {tokens} tokens, random weights", tokens, model, images, labels


def main() -> None:
    """Measure, print, and write benchmarks/results/certify_*_cpu.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--method", choices=METHODS, default="adjoint")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--handover", type=Path, nargs="+", default=[])
    parser.add_argument("--shards", type=Path)
    arguments = parser.parse_args()
    given, rows = Given(arguments.method, arguments.batch, arguments.workers), {}
    for name, tokens, model, images, labels in subjects(arguments):
        rows[name] = measure(model, images, labels, given)
        if (given.method, tokens) in TARGETS:
            rows[name]["target"] = TARGETS[given.method, tokens]
        print(name, {key: round(value, 4) for key, value in rows[name].items()})
    trained = "trained_" if arguments.handover else ""
    method = "" if given.method == "adjoint" else f"{given.method}_"
    record(f"certify_{trained}{method}cpu", asdict(given) | {"eps": EPS, "rows": rows})


if __name__ == "__main__":
    main()
