"""Linear bounds beside auto_LiRPA's CROWN: the losses of all rivals of small networks, and the time of both.

    most, median   our loss / theirs over images and rivals
    seconds, time  of an image with all rivals by us, without tracing the network, and ours / theirs

Ours is one backward pass without a search for slopes, as is CROWN. Networks are random and get random images.
certify/methods/crown.py says how to install auto_LiRPA.

    python -m benchmarks.bench_crown                  # to benchmarks/results/crown_cpu.json
    python -m benchmarks.bench_crown --cells 1024     # curved functions on a finer grid: printed only
"""

import argparse
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.record import record
from benchmarks.vnncomp import vit
from certify.linear.backward import Bounds, lowest
from certify.linear.capture import program_of
from certify.linear.enclosures import scalars
from certify.methods import crown
from certify.shared.bake import bake
from certify.shared.ball import Ball
from certify.shared.certificate import margin_rows
from tests.tools.exported_vit import exported, published_vit
from tests.tools.small_models import small_model

IMAGES = 4
EPS = {"l2": (0.01, 0.1), "linf": (0.001, 0.01)}
MNIST, CIFAR, SMALL = (1, 28, 28), (3, 32, 32), (1, 8, 8)  # shapes of images
Row = dict[str, Any]


def mlp(depth: int, act: Callable[[], nn.Module], width: int = 100) -> nn.Module:
    widths = (math.prod(MNIST), *[width] * depth)
    hidden = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), act())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))


def convnet(act: Callable[[], nn.Module], norm: bool = False) -> nn.Module:
    """Return the small network of Wong and Kolter (2018)."""
    norms = (nn.BatchNorm2d(16), nn.BatchNorm2d(32)) if norm else ()
    convs = nn.Conv2d(3, 16, 4, 2, 1), *norms[:1], act(), nn.Conv2d(16, 32, 4, 2, 1), *norms[1:], act()
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(2048, 100), act(), nn.Linear(100, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {
    "MLP, 2 layers, ReLU": (partial(mlp, 2, nn.ReLU), MNIST),
    "MLP, 5 layers, ReLU": (partial(mlp, 5, nn.ReLU), MNIST),
    "MLP, 3 layers, tanh": (partial(mlp, 3, nn.Tanh), MNIST),
    "convolutions, ReLU": (partial(convnet, nn.ReLU), CIFAR),
    "convolutions, batch norm, ReLU": (partial(convnet, nn.ReLU, norm=True), CIFAR),
    "convolutions, sigmoid": (partial(convnet, nn.Sigmoid), CIFAR),
    "ViT of VNN-COMP": (lambda: vit.read(exported(published_vit(0))), (3, 8, 8)),
    "ViT, layer norms, GELU": (partial(small_model, "standard", 0), SMALL),
    "ViT, class token": (partial(small_model, "cls", 0), SMALL),
    "ViT, fc_norm": (partial(small_model, "fc_norm", 0), SMALL),
}


def rows_of(name: str, norm: str) -> Iterator[Row]:
    """Yield a row per eps."""
    torch.manual_seed(0)
    make, shape_CHW = NETWORKS[name]
    model = make().double().eval()
    x = torch.rand(IMAGES, *shape_CHW, dtype=torch.float64)
    with torch.no_grad():
        logits = model(x)
    baked = bake(model)
    program, ball, theirs = program_of(baked, shape_CHW), Ball(norm, x[0].numel()), crown.traced(baked, x[:1], norm)

    def our_lower(image: Tensor, rows: Tensor, eps: float) -> Tensor:
        bounds = Bounds.on_balls(program, image.unsqueeze(1), torch.tensor([eps], dtype=x.dtype), ball)
        return lowest(bounds, rows[None])[0]

    for eps in EPS[norm]:
        ratios, times = list[Tensor](), [0.0, 0.0]
        for image, logits_J in zip(x.split(1), logits, strict=True):
            label = int(logits_J.argmax())
            rivals = [j for j in range(len(logits_J)) if j != label]
            rows = margin_rows(torch.tensor([label]), logits_J)[0, rivals]
            losses = list[Tensor]()
            for k, lower in enumerate((our_lower, theirs)):
                start = time.process_time()
                losses.append(rows @ logits_J - lower(image, rows, eps))
                times[k] += time.process_time() - start
            ratios.append(losses[0] / losses[1])
        ratio = torch.cat(ratios)
        figures = {"most": float(ratio.max()), "median": float(ratio.median())}
        yield (
            {"network": name, "norm": norm, "eps": eps}
            | {key: round(value, 7) for key, value in figures.items()}
            | {
                "seconds": float(f"{times[0] / IMAGES:.3g}"),
                "time": round(times[0] / times[1], 2),
            }
        )


@torch.no_grad()
def measured(name: str) -> list[Row]:
    """Return the rows of a network in both norms, on one core."""
    torch.set_num_threads(1)
    return [row for norm in EPS for row in rows_of(name, norm)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS), metavar="NETWORK")
    parser.add_argument("--cells", type=int, default=scalars.PARTS, help="of the grid of a curved function")
    options = parser.parse_args()
    scalars.PARTS, finer = options.cells, options.cells != scalars.PARTS
    if not crown.installed():
        sys.exit(f"auto_LiRPA is not installed; {crown.INSTALL}")
    rows = list[Row]()
    for name in options.only:  # each in a process of its own: auto_LiRPA fails on some networks after others
        with multiprocessing.get_context("fork").Pool(1) as pool:
            rows += pool.apply(measured, (name,))
        print(*rows[-4:], sep="\n", flush=True)
    if options.only == list(NETWORKS) and not finer:
        record("crown_cpu", {"images": IMAGES, "rows": rows})


if __name__ == "__main__":
    main()
