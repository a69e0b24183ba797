"""Certificates of common models: which are accepted, by which method, with which radii and in what time.

Classes of torch, torchvision and timm as they are, with 10 classes and images of 32 x 32 pixels, random weights,
running statistics of random images, and the model's own answers as labels. The radii say how much of a method's bound
is left after so many layers, not how robust a trained model is.

    python -m benchmarks.bench_models                       # all, to benchmarks/results/models_cpu.json
    python -m benchmarks.bench_models --only resnet18 deit
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import zoo  # noqa: F401  (repairs torchvision before timm imports it)
from benchmarks.record import RESULTS, circumstances, write
from certify import explain
from certify.graph.model import NotCaptured, with_rules

IMAGES, SIZE, CLASSES = 2, 32, 10


def plain() -> nn.Module:
    """Return a conv net with batch normalisation and pooling."""
    layers: list[nn.Module] = []
    for width, out in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, CLASSES))


def of_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=CLASSES, **options)

    return make


def of_torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        made: nn.Module = getattr(torchvision.models, name)(num_classes=CLASSES, **options)
        return made

    return make


PATCHES = {"img_size": SIZE, "patch_size": 4}
VIT = {"image_size": SIZE, "patch_size": 4, "num_layers": 6, "num_heads": 3, "hidden_dim": 192, "mlp_dim": 768}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain CNN": plain,
    "torchvision resnet18": of_torchvision("resnet18"),
    "torchvision VisionTransformer": of_torchvision("VisionTransformer", **VIT),
    "torchvision mobilenet_v2": of_torchvision("mobilenet_v2"),
    "timm resnet18": of_timm("resnet18"),
    "timm resnet10t": of_timm("resnet10t"),
    "timm vit_tiny": of_timm("vit_tiny_patch16_224", **PATCHES),
    "timm deit_tiny": of_timm("deit_tiny_patch16_224", **PATCHES),
    "timm convnext_atto": of_timm("convnext_atto"),
    "timm mixer": of_timm("mixer_s16_224", img_size=SIZE),
    "timm swin_tiny": of_timm("swin_tiny_patch4_window7_224", img_size=SIZE, window_size=4),
    "timm efficientnet_b0": of_timm("efficientnet_b0"),
}


def measured(make: Callable[[], nn.Module]) -> dict[str, Any]:
    """Return one row: the answer, the method, the median radius, and the seconds of capture and of an image."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear) and not bool(layer.weight.any()):  # heads that begin at 0 have no margins
                nn.init.normal_(layer.weight, std=0.02)
        for _ in range(5):
            model.train()(torch.rand(16, 3, SIZE, SIZE))
        images = torch.rand(IMAGES, 3, SIZE, SIZE)
        labels = model.eval()(images).argmax(-1)
    row: dict[str, Any] = {"parameters": sum(weight.numel() for weight in model.parameters())}
    start = time.perf_counter()
    try:
        with_rules(model, images, labels)
    except NotCaptured as refused:
        return row | {
            "accepted": False,
            "missing": sorted({f"{fault.operation}: {fault.reason}" for fault in refused.faults}),
        }
    row |= {"accepted": True, "capture_s": round(time.perf_counter() - start, 2)}
    start = time.perf_counter()
    found = explain(model, images, labels, nonce="bench")
    seconds = (time.perf_counter() - start - row["capture_s"]) / IMAGES
    radius = float(found.radius_B.median())
    return row | {"method": found.method, "median_radius": float(f"{radius:.3g}"), "image_s": round(seconds, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="measure only models whose names contain a WORD"
    )
    only = parser.parse_args().only
    file = RESULTS / "models_cpu.json"
    rows = json.loads(file.read_text())["models"] if only and file.is_file() else {}
    for name, make in MODELS.items():
        if not only or any(word in name for word in only):
            rows[name] = measured(make)
            print(name, rows[name], flush=True)
            write("models_cpu", circumstances() | {"images": IMAGES, "img_size": SIZE, "models": rows})  # row by row


if __name__ == "__main__":
    main()
