"""Certificates of the models with weights: what one image costs by each method, in seconds of a core and MiB.

The image is the ship of `python -m certify serve`, with the model's own answer as its label. It is certified alone, so
that the work done once for a model counts. Every pair of model and method has a process of its own, whose memory is
measured, the 300 to 400 MiB of PyTorch included.

    python -m benchmarks.bench_weights         # to benchmarks/results/weights_cpu.json
"""

import time
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_tensor

import certify
import zoo
from benchmarks.bench_models import Row, in_a_process
from benchmarks.record import circumstances, write
from certify.api import certifier, radius_of

METHODS = ("lofast", "adjoint")  # what `best` takes is in the certified results: seconds_per_image
SAMPLE = Path(certify.__file__).parent / "photos" / "samples" / "ship.png"


def sample(in_chans: int, img_size: int) -> Tensor:
    """Return the picture at a model's size: (1, C, H, W) in [0,1]."""
    picture = Image.open(SAMPLE).convert("RGB" if in_chans == 3 else "L")
    return to_tensor(picture.resize((img_size, img_size)))[None]


def row_of(pair: str) -> Row:
    """Return the seconds of one image by a model and a method, given as 'NAME METHOD'; loading is not counted."""
    name, method = pair.split()
    options, model = zoo.model_options(name), zoo.create_model(name, pretrained=True).eval()
    image = sample(options["in_chans"], options["img_size"])
    with torch.no_grad():
        label = model(image).argmax(-1)
    start = time.process_time()
    radius = float(radius_of(certifier(model, method, "bench", batch=(image, label)).analyse(image, label)))
    seconds = time.process_time() - start
    parameters = sum(weight.numel() for weight in model.parameters())
    return {"parameters": parameters, "image_s": float(f"{seconds:.2g}"), "radius": float(f"{radius:.3g}")}


def main() -> None:
    pairs = [f"{name} {method}" for name in zoo.weights.entries() for method in METHODS]
    rows: dict[str, Row] = {}
    for pair in pairs:
        rows[pair] = in_a_process(row_of, pair)
        print(pair, rows[pair], flush=True)
    write("weights_cpu", circumstances() | {"command": "python -m benchmarks.bench_weights", "pairs": rows})


if __name__ == "__main__":
    main()
