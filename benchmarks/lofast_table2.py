"""LoFAST's Table 2: certify by Theorem 1 first, and by a slower method only what it leaves open.

Each method gets the same images, one at a time. A combination certifies what either of its methods certifies; it costs
the time of Theorem 1 for every image and that of the other for the images left open. Seconds are means over the
correctly classified images, since wrong ones need no bound. `crown` is auto_LiRPA's (certify/methods/crown.py says how
to install it), `adjoint` ours.

    python -m benchmarks.lofast_table2 runs/lofast_vit_c10-cifar10-s0/handover SHARDS
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.bench_certify import handed_over
from benchmarks.record import record
from certify.adjoint.adjoint import Adjoint
from certify.methods import crown
from certify.methods.lofast import LoFAST
from certify.shared.certificate import Certifier
from certizoo.progress import progress_bar

EPS = (0.02, 0.05, 0.1)
METHODS: dict[str, Callable[[nn.Module], Certifier]] = {"lofast": LoFAST, "crown": crown.Crown, "adjoint": Adjoint}
FIRST = "lofast"
Row = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """An answer for one image: certified or not, and the seconds that it took."""

    certified: bool
    seconds: float


def answers(certifier: Certifier, image_1CHW: Tensor, label_1: Tensor) -> list[Answer]:
    """Return the answer for each of EPS; the time of the analysis is shared among them."""
    start = time.perf_counter()
    analysis = certifier.analyse(image_1CHW, label_1)
    shared, found = (time.perf_counter() - start) / len(EPS), list[Answer]()
    for eps in EPS:
        start = time.perf_counter()
        certified = bool(analysis.at(eps).certified_B)
        found.append(Answer(certified, shared + time.perf_counter() - start))
    return found


def with_combinations(found: dict[str, Answer]) -> dict[str, Answer]:
    """Return the answers of each method for one image and eps, with those of all combinations."""
    first, both = found[FIRST], dict(found)
    for method, other in found.items():
        if method != FIRST:
            seconds = first.seconds + (0.0 if first.certified else other.seconds)
            both[f"{FIRST}, then {method}"] = Answer(first.certified or other.certified, seconds)
    return both


def summary(answered: Sequence[dict[str, Answer]], eps: float, images: int) -> Iterator[Row]:
    """Yield a row per method or combination: per cent of all images, and mean seconds of the correct ones."""
    for method in answered[0]:
        of_method = [answers[method] for answers in answered]
        certified = 100 * sum(answer.certified for answer in of_method) / images
        seconds = sum(answer.seconds for answer in of_method) / len(of_method)
        yield {"eps": eps, "method": method, "certified": round(certified, 2), "seconds": float(f"{seconds:.3g}")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("handover", type=Path, help="folder of a trained lofast_vit_c10")
    parser.add_argument("shards", type=Path, help="folder with CIFAR-10 as JPEG shards")
    parser.add_argument("--images", type=int, default=200, help="first test images (default: %(default)s)")
    options = parser.parse_args()
    if not crown.installed():
        sys.exit(f"auto_LiRPA is not installed; {crown.INSTALL}")
    name, model, images, labels = handed_over(options.handover, options.shards, options.images)
    with torch.no_grad():
        correct = (model(images).argmax(-1) == labels).nonzero().flatten().tolist()
    certifiers = {method: make(model) for method, make in METHODS.items()}
    answered: dict[float, list[dict[str, Answer]]] = {eps: [] for eps in EPS}
    with progress_bar("certifying", Console()) as progress:
        for done, index in enumerate(correct, 1):
            image, label = images[index : index + 1], labels[index : index + 1]
            found = {method: answers(certifier, image, label) for method, certifier in certifiers.items()}
            for k, eps in enumerate(EPS):
                answered[eps].append(with_combinations({method: of_one[k] for method, of_one in found.items()}))
            progress(done, len(correct))
    rows = [row for eps in EPS for row in summary(answered[eps], eps, len(images))]
    clean = round(100 * len(correct) / len(images), 2)
    record("lofast_table2", {"model": name, "images": len(images), "clean": clean, "rows": rows})


if __name__ == "__main__":
    main()
