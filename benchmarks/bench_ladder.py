"""Cost of a certificate on the ball of images at 224 pixels, 16-pixel patches and 1000 classes.

It reports processor seconds and bytes of one image with the label that the model gives it, the share of each stage, and
the resulting radius.

    python -m benchmarks.bench_ladder                                   # ViT-Ti, random weights, an image of noise
    python -m benchmarks.bench_ladder --model dp_vit_s                  # an hour of one core
    python -m benchmarks.bench_ladder --handover RUN/handover --shards FOLDER    # a trained model, its first test image

It uses one thread; with --device cuda a GPU, timed by the clock.
"""

import argparse
import resource
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zoo
from benchmarks.bench_certify import handed_over
from benchmarks.record import record
from certify.api import certifier, radius_of
from certify.shared.certificate import guess_of

SIZES: dict[str, Any] = {"img_size": 224, "patch_size": 16, "num_classes": 1000}
STAGES = ("clean points", "first radius", "maps and margins", "search")


def measured(model: torch.nn.Module, image_1CHW: Tensor, label_1: Tensor) -> dict[str, Any]:
    """Measure one image with its label."""
    clock = time.perf_counter if image_1CHW.is_cuda else time.process_time
    prover, times = certifier(model, "image"), [clock()]
    analysis = prover.analyse(image_1CHW, label_1)
    times.append(clock())
    guess_of(analysis)
    times.append(clock())
    analysis.at(0.0)
    times.append(clock())
    radius = float(radius_of(analysis))
    times.append(clock())
    seconds = times[-1] - times[0]
    shares = [(end - start) / seconds for start, end in pairwise(times)]
    return {
        "margin": float(analysis.clean.margin_BJ.min()),
        "radius": radius,
        "seconds": seconds,
        "share": dict(zip(STAGES, shares, strict=True)),
        "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # KiB
        "failure": analysis.failure,
    }


def random_weights(name: str, depth: int | None) -> tuple[torch.nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = zoo.create_model(name, **SIZES | ({} if depth is None else {"depth": depth})).eval()
    image_1CHW = torch.rand(1, 3, 224, 224)
    return model, image_1CHW, model(image_1CHW).argmax(-1)


def trained(handover: Path, folder: Path) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """Return a trained model, the first available image of its data, and the label that it predicts."""
    _, model, image_1CHW, _ = handed_over(handover, folder, 1)
    return model, image_1CHW, model(image_1CHW).argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dp_vit_ti")
    parser.add_argument("--depth", type=int)
    parser.add_argument("--handover", type=Path)
    parser.add_argument("--shards", type=Path, default=Path("data"))
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.handover:
        subject = trained(options.handover, options.shards)
    else:
        subject = random_weights(options.model, options.depth)
    model, image_1CHW, label_1 = subject
    moved = model.to(options.device), image_1CHW.to(options.device), label_1.to(options.device)
    name = options.handover.parent.name if options.handover else options.model
    record(f"ladder_{name}_{options.device}", {"model": name} | measured(*moved))


if __name__ == "__main__":
    main()
