"""Certificates of the models with weights: what one image costs by each method, in seconds of a core and MiB.

The images are the samples of `python -m certify serve`, with the model's own answers as labels. Every pair of model and
method has a process of its own, whose memory is measured, the 300 to 400 MiB of PyTorch included.

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

METHODS = ("lofast", "adjoint", "best")
SAMPLES = sorted((Path(certify.__file__).parent / "photos" / "samples").glob("*.png"))


def samples(in_chans: int, img_size: int) -> Tensor:
    """Return the sample photographs at a model's size: (B, C, H, W) in [0,1]."""
    mode = "RGB" if in_chans == 3 else "L"
    return torch.stack([to_tensor(Image.open(path).convert(mode).resize((img_size, img_size))) for path in SAMPLES])


def row_of(pair: str) -> Row:
    """Return the seconds of one image by a model and a method, given as 'NAME METHOD'; loading is not counted."""
    name, method = pair.split()
    options, model = zoo.model_options(name), zoo.create_model(name, pretrained=True).eval()
    images = samples(options["in_chans"], options["img_size"])
    with torch.no_grad():
        labels = model(images).argmax(-1)
    start = time.process_time()
    radius_B = radius_of(certifier(model, method, "bench", batch=(images, labels)).analyse(images, labels))
    seconds = (time.process_time() - start) / len(images)
    parameters = sum(weight.numel() for weight in model.parameters())
    radii = [float(f"{radius:.3g}") for radius in radius_B.tolist()]
    return {"parameters": parameters, "images": len(images), "image_s": float(f"{seconds:.2g}"), "radii": radii}


def main() -> None:
    pairs = [f"{name} {method}" for name in zoo.weights.entries() for method in METHODS]
    rows: dict[str, Row] = {}
    for pair in pairs:
        rows[pair] = in_a_process(row_of, pair)
        print(pair, rows[pair], flush=True)
    write("weights_cpu", circumstances() | {"command": "python -m benchmarks.bench_weights", "pairs": rows})


if __name__ == "__main__":
    main()
