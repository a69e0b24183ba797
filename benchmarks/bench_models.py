"""Certificates of common models: which are accepted, by which method, with which radii, at what cost.

Classes of torch, torchvision, timm and other libraries as they are (benchmarks/common_models.py), with random weights,
running statistics of random images and the model's own answers as labels: their radii say how much of a bound is left
after so many layers. The trained ones learn a few minutes on CIFAR-10 ($CERTIZOO_DATA, or data/cifar10), and are
certified at test images with their true labels. Every radius is attacked by gradient ascent in float64; a beaten one
ends the program. Seconds are those of one CPU core; every model has a process of its own, whose memory is measured.

    python -m benchmarks.bench_models                       # all, to benchmarks/results/models_cpu.json
    python -m benchmarks.bench_models --only resnet18 deit
"""

import argparse
import json
import multiprocessing
import os
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import zoo  # noqa: F401  (repairs torchvision before timm imports it)
from benchmarks.common_models import MODELS, SIZE, TRAINED, Make
from benchmarks.record import RESULTS, circumstances, write
from benchmarks.timing import timed
from certify.api import certifier, radius_of
from certify.graph.model import NotCaptured
from certify.methods import products
from certify.shared.bake import folded_copy
from certizoo import UserError, shards

IMAGES, LARGE = 2, 2e7  # models with more products a forward pass are certified at one image
STEPS, BUDGET, SMALL = 8, 1e10, 1e6  # of the ascent; products of its forward passes, ten times that for small models
TOGETHER = 2**27  # products of the starts that take a step together
EPOCHS, EXAMPLES, BATCH = 4, 4000, 64
Row = dict[str, Any]


class Beaten(Exception):
    """An attack found another class within a certified radius."""


def at_random(make: Make) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model with random weights and settled statistics, random images, and its answers."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear) and not bool(layer.weight.any()):  # heads that begin at 0 have no margins
                nn.init.normal_(layer.weight, std=0.02)
        for _ in range(5):
            model.train()(torch.rand(16, 3, SIZE, SIZE))
        images = torch.rand(1 if products(model, (3, SIZE, SIZE)) > LARGE else IMAGES, 3, SIZE, SIZE)
        return model, images, model.eval()(images).argmax(-1)


def trained(make: Make, factor: float) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model that has learned CIFAR-10 for a few epochs, and test images that it classifies correctly."""
    (images, labels), (tests, answers) = _cifar10("train", EXAMPLES), _cifar10("test", 64)
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(EPOCHS):
        for index in torch.randperm(len(labels)).split(BATCH):
            loss = cross_entropy(factor * model(images[index]), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        correct = (model.eval()(tests).argmax(-1) == answers).nonzero()[: 2 * IMAGES, 0]
    return model, tests[correct], answers[correct]


def _cifar10(split: str, count: int) -> tuple[Tensor, Tensor]:
    root = os.environ.get("CERTIZOO_DATA", "data/cifar10")
    config = shards.DataConfig("cifar10", root, "cifar10-train-*.tar", "cifar10-test-*.tar", 10, SIZE)
    loader = shards.eval_loader(shards.find(config, split), config, batch_size=count, limit=count)
    _, images, labels = next(iter(loader))
    return images, labels


def measured(model: nn.Module, images: Tensor, labels: Tensor, budget: float = BUDGET) -> Row:
    """Return one row: accepted or what is missing, method, radii, seconds, and the attack."""
    cost = products(model, (3, SIZE, SIZE))
    row: Row = {"parameters": sum(weight.numel() for weight in model.parameters()), "products": cost}
    try:
        made, capture_s = timed(lambda: certifier(model, "auto", nonce="bench", batch=(images, labels)))
    except NotCaptured as refused:
        missing = sorted({f"{fault.operation}: {fault.reason}" for fault in refused.faults})
        return row | {"accepted": False, "missing": missing}
    row |= {"accepted": True, "method": type(made).__name__.lower(), "capture_s": round(capture_s, 1)}
    radius_B, seconds = timed(lambda: radius_of(made.analyse(images, labels)))
    row |= {"images": len(images), "image_s": round(seconds / len(images), 1)}
    row |= {"radii": [float(f"{radius:.3g}") for radius in radius_B.tolist()]}
    row["median_radius"] = float(f"{float(radius_B.median()):.3g}")
    starts = max(8, int((10 if cost < SMALL else 1) * budget / (STEPS * 2 * cost * len(images))))
    return row | {"starts": attacked(model, images, labels, radius_B, starts, max(8, TOGETHER // cost))}


def attacked(model: nn.Module, images: Tensor, labels: Tensor, radius_B: Tensor, starts: int, together: int) -> int:
    """Search for another class within each radius, from this many starts an image; return how many were made.

    Normalised steps along the gradient of the margin, in float64 with folded weights, and back onto the ball. Raises
    Beaten.
    """
    wide, made = folded_copy(model).requires_grad_(False).double(), 0
    torch.manual_seed(1)
    for image, label, radius in zip(images.double(), labels, radius_B.tolist(), strict=True):
        for size in map(len, torch.arange(starts).split(together)):
            delta = _length(torch.randn(size, *image.shape).double(), radius)
            for step in range(STEPS):
                logits = wide(image + delta.requires_grad_())
                others = logits.index_fill(1, label, -torch.inf).amax(1)
                if bool((others >= logits[:, label]).any()):
                    raise Beaten(f"an image of {type(model).__name__} has another class within {radius:.6g}")
                (g,) = torch.autograd.grad((others - logits[:, label]).sum(), delta)
                towards = delta.detach() + _length(g, radius * (1.0 if step < STEPS // 2 else 0.3))
                delta = _length(towards, radius)
            made += size
    return made


def _length(x: Tensor, length: float) -> Tensor:
    """Return x scaled to this length, image by image: the worst point of a ball lies nearly always on its sphere."""
    return length * x / x.flatten(1).norm(dim=1).clamp_min(1e-300).view(-1, 1, 1, 1)


def row_of(name: str, budget: float = BUDGET) -> Row:
    """Return the row of one model; one that cannot be made says why."""
    try:
        model, images, labels = trained(*TRAINED[name]) if name in TRAINED else at_random(MODELS[name])
    except ImportError as absent:
        return {"accepted": False, "missing": [f"not installed: {absent}"]}
    return measured(model, images, labels, budget)


def in_a_process(work: Callable[[str], Row], name: str) -> Row:
    """Return work(name), computed in a process of its own, and its peak memory in MiB."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_with_memory, (work, name))


def _with_memory(work: Callable[[str], Row], name: str) -> Row:
    torch.set_num_threads(1)
    try:
        row = work(name)
    except UserError as refused:
        row = {"accepted": False, "missing": [str(refused)]}
    return row | {"memory_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="measure only models whose names contain a WORD"
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET, help=f"products of the attack of a model (default: {BUDGET:g})"
    )
    args = parser.parse_args()
    only = args.only
    file = RESULTS / "models_cpu.json"
    rows: dict[str, Row] = json.loads(file.read_text())["models"] if only and file.is_file() else {}
    for name in (*MODELS, *TRAINED):
        if not only or any(word in name for word in only):
            rows[name] = in_a_process(partial(row_of, budget=args.budget), name)
            print(name, rows[name], flush=True)
            made = circumstances() | {"command": "python -m benchmarks.bench_models"}  # whichever rows were made last
            write("models_cpu", made | {"img_size": SIZE, "steps": STEPS, "models": rows})


if __name__ == "__main__":
    main()
