"""Overhead of PGD beyond its arithmetic: images per second of `attacks.pgd`, compared with three alternatives.

    against a plain loop of torch calls, the same steps from the same images     plain:  at least 0.98 of its throughput
    with stop_when_fooled against without, on a model that nearly all fool       stop:   at least 1.5 times
    against foolbox's PGD, the same steps from the same images                   foolbox: not slower

`worst` is `plain` with the worst point kept, as evaluation runs it: two more forward passes. The two sides alternate
and the ratio is taken pair by pair, so that a machine whose speed drifts slows both. On a CPU the seconds are processor
time of this process, so other programs do not count.

    python -m benchmarks.bench_attacks [--batch 16] [--steps 20] [--pairs 9] [--depth 4]

    # an H100 or H200:
    python -m benchmarks.bench_attacks --model dp_vit_b --img-size 224 --patch-size 16 --depth 12 --batch 128
"""

import argparse
import statistics

import foolbox
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from benchmarks import timing
from benchmarks.record import record
from benchmarks.timing import Way
from certizoo.attacks import AttackConfig
from certizoo.attacks.loop import probing

EPS = 8 / 255


def main() -> None:
    """Measure, print, and write benchmarks/results/attacks_DEVICE.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dp_vit_ti")
    parser.add_argument("--img-size", type=int, default=32)
    parser.add_argument("--patch-size", type=int, default=4)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    sizes = {"img_size": options.img_size, "patch_size": options.patch_size, "depth": options.depth, "num_classes": 10}
    model: nn.Module = zoo.create_model(options.model, **sizes).to(device).eval()
    images = torch.rand(options.batch, 3, options.img_size, options.img_size, device=device)
    with torch.no_grad():
        labels = model(images).argmax(1)  # its own answers, which a step or two change: weights are random
    results: dict[str, dict[str, float]] = {}
    for norm in ("linf", "l2"):
        results |= {f"{norm}_{name}": row for name, row in of_norm(norm, model, images, labels, options).items()}
    record(f"attacks_{device.type}", vars(options) | results)


def of_norm(
    norm: str, model: nn.Module, images: Tensor, labels: Tensor, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Return the four comparisons: the throughput of the first side relative to the second."""
    eps = EPS if norm == "linf" else EPS * images[0].numel() ** 0.5
    alpha = 2.5 * eps / options.steps
    attack = AttackConfig(norm, eps, options.steps, alpha, random_start=False)
    stopping = AttackConfig(norm, eps, options.steps, alpha, random_start=False, stop_when_fooled=True)
    kind = foolbox.attacks.LinfPGD if norm == "linf" else foolbox.attacks.L2PGD
    theirs = kind(abs_stepsize=alpha, steps=options.steps, random_start=False)
    bounded = foolbox.PyTorchModel(model, bounds=(0, 1), device=images.device)

    def plain() -> Tensor:
        with probing(model):
            return plain_pgd(model, images, labels, norm, eps, alpha, options.steps)

    def by_foolbox() -> Tensor:
        with probing(model):
            found: Tensor = theirs.run(bounded, images, labels, epsilon=eps)
        return found

    def last() -> Tensor:
        return attack.run(model, images, labels, keep_worst=False)

    def worst() -> Tensor:
        return attack.run(model, images, labels)

    def stop() -> Tensor:
        return stopping.run(model, images, labels)

    assert same(last(), plain())
    assert same(last(), by_foolbox())
    pairs = {"plain": (last, plain), "worst": (worst, plain), "stop": (stop, worst), "foolbox": (last, by_foolbox)}
    return {name: compared(*ways, options.pairs, images) for name, ways in pairs.items()}


def same(first: Tensor, second: Tensor) -> bool:
    """Return True for equal points; a GPU sums gradients in varying order, which flips a few signs near zero."""
    return float((first - second).abs().mean()) < (0.1 * EPS if first.is_cuda else 1e-6)


def plain_pgd(
    model: nn.Module, images: Tensor, labels: Tensor, norm: str, eps: float, alpha: float, steps: int
) -> Tensor:
    """Run PGD as written in a notebook."""
    x = images
    for _ in range(steps):
        x = x.detach().requires_grad_(True)
        (grad,) = torch.autograd.grad(F.cross_entropy(model(x), labels, reduction="sum"), x)
        if norm == "linf":
            delta = (x.detach() + alpha * grad.sign() - images).clamp(-eps, eps)
        else:
            delta = x.detach() + alpha * grad / length(grad) - images
            delta = delta * (eps / length(delta)).clamp_max(1.0)
        x = (images + delta).clamp(0, 1)
    return x


def length(x: Tensor) -> Tensor:
    """Return the L2 norm of each image."""
    return x.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1, 1)


def compared(first: Way, second: Way, pairs: int, images: Tensor) -> dict[str, float]:
    """Return images per second of both sides (medians), and median and quartiles of first / second over the pairs."""
    times = timing.pairs(first, second, pairs, timing.clock_of(images.device), swap=False)
    ratios = [theirs / ours for ours, theirs in times]
    low, _, high = statistics.quantiles(ratios, n=4)
    ours, theirs = (len(images) / statistics.median(column) for column in zip(*times, strict=True))
    return {
        "images_per_s": round(ours, 2),
        "images_per_s_other": round(theirs, 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_quartiles_low": round(low, 3),
        "ratio_quartiles_high": round(high, 3),
    }


if __name__ == "__main__":
    main()
