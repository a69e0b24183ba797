"""Pairs of implementations with equal results, timed against each other.

Compared are the patch embedding as a convolution and as one product with the patches (zoo/layers/patches.py), a stem by
convolutions and by products (zoo/layers/convolution.py), gated positions on the fused kernel and written out
(zoo/attention/gpsa.py), and attention in bf16 on the fused kernel and step by step (trainers/engine/engine.py).

The two alternate, and the ratio is that of the medians of processor time. `image`: forward, and backward to the input
only, as an attack does; `all`: forward, and backward to input and weights; `slope` (stems): forward, the gradient for
the image, and backward from its length to the weights, as the objective `lmce` does.

    python -m benchmarks.bench_layers [--turns 30]
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import timing
from benchmarks.record import record
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.gpsa import GPSA
from zoo.layers.convolution import CellConv2d
from zoo.layers.patches import ConvStem, PatchProjection

PATCHES = ((3, 126, 8, 32, 128), (3, 192, 4, 32, 64), (3, 384, 16, 224, 8))  # channels, width, patch, image, batch
STEMS = (((256, 8, 4, 2), 126, 8, 32, 128), ((64, 4, 2, 1), 128, 4, 32, 64))  # a row, dim, patch, image, batch
POSITIONS = ((16, 126, 128), (64, 126, 32), (196, 432, 8))  # tokens, width, batch; 9 heads
BF16 = ((17, 96, 3, 256), (65, 96, 3, 64), (197, 384, 6, 16))  # tokens, width, heads, batch


def patches(chans: int, dim: int, patch: int, size: int, batch: int) -> tuple[nn.Module, nn.Module, Tensor]:
    convolution, product = (kind(chans, dim, patch, patch) for kind in (nn.Conv2d, PatchProjection))
    return convolution, product, torch.rand(batch, chans, size, size, requires_grad=True)


def stem(row: tuple[int, ...], dim: int, patch: int, size: int, batch: int) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return both stems and an input; gradients arrive from tokens."""
    products, convolutions = (
        nn.Sequential(ConvStem(size, patch, 3, dim, layers=(row,)), nn.Linear(dim, 1)) for _ in range(2)
    )
    convs: Any = convolutions[0].convs
    for i, conv in enumerate(convs):
        if isinstance(conv, CellConv2d):
            geometry: Any = conv.kernel_size, conv.stride, conv.padding
            convs[i] = nn.Conv2d(conv.in_channels, conv.out_channels, *geometry)
    return convolutions, products, torch.rand(batch, 3, size, size, requires_grad=True)


class Way(nn.Module):
    """GPSA in one of its two implementations, for any number of tokens."""

    def __init__(self, module: GPSA, way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module, self.way = module, way

    def forward(self, x_BND: Tensor) -> Tensor:
        content: Any = self.module.content
        return content.merge(self.way(*content.heads(x_BND)))


def positions(tokens: int, dim: int, batch: int) -> tuple[nn.Module, nn.Module, Tensor]:
    module = GPSA(DotProductAttention(dim, 9))
    x_BND = torch.randn(batch, tokens, dim, requires_grad=True)
    return Way(module, module._fused), Way(module, module._written_out), x_BND


class Kernel(nn.Module):
    """A module in bf16 with its attention by one kernel."""

    def __init__(self, module: nn.Module, backend: SDPBackend) -> None:
        super().__init__()
        self.module, self.backend = module, backend

    def forward(self, x_BND: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(self.backend):
            y_BND: Tensor = self.module(x_BND)
        return y_BND


def kernels(tokens: int, dim: int, heads: int, batch: int) -> tuple[nn.Module, nn.Module, Tensor]:
    module = DotProductAttention(dim, heads)
    x_BND = torch.randn(batch, tokens, dim, requires_grad=True)
    return Kernel(module, SDPBackend.FLASH_ATTENTION), Kernel(module, SDPBackend.MATH), x_BND


def image(module: nn.Module, x: Tensor) -> None:
    torch.autograd.grad(module(x).sum(), x)


def everything(module: nn.Module, x: Tensor) -> None:
    torch.autograd.grad(module(x).sum(), [x, *module.parameters()], allow_unused=True)


def slope(module: nn.Module, x: Tensor) -> None:
    (slope_BCHW,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    torch.autograd.grad(slope_BCHW.flatten(1).norm(dim=1).sum(), list(module.parameters()), allow_unused=True)


Step = Callable[[nn.Module, Tensor], None]
STEPS: dict[str, Step] = {"image": image, "all": everything}


def compared(first: nn.Module, second: nn.Module, x: Tensor, turns: int, steps: dict[str, Step]) -> dict[str, float]:
    """Return both medians in milliseconds, and first / second."""
    row: dict[str, float] = {}
    for name, step in steps.items():
        times = timing.pairs(partial(step, first, x), partial(step, second, x), turns + 1, swap=False)[1:]
        before, after = (1000 * statistics.median(column) for column in zip(*times, strict=True))
        row |= {f"{name}_ms_first": before, f"{name}_ms_second": after, f"{name}_ratio": before / after}
    return {key: round(value, 2) for key, value in row.items()}


def main() -> None:
    """Measure, print, and write benchmarks/results/layers_cpu.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    turns = parser.parse_args().turns
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = {}
    for chans, dim, patch, size, batch in PATCHES:
        name = f"patch embedding, {chans} -> {dim}, patch {patch}, image {size}, batch {batch}"
        rows[name] = compared(*patches(chans, dim, patch, size, batch), turns, STEPS)
    for row, dim, patch, size, batch in STEMS:
        name = f"stem of {row[0]} filters, {row[1]} pixels, stride {row[2]}, image {size}, batch {batch}"
        rows[name] = compared(*stem(row, dim, patch, size, batch), turns, STEPS | {"slope": slope})
    for tokens, dim, batch in POSITIONS:
        rows[f"gated positions, {tokens} tokens, width {dim}, batch {batch}"] = compared(
            *positions(tokens, dim, batch), turns, STEPS
        )
    for tokens, dim, heads, batch in BF16:
        name = f"attention in bf16, {tokens} tokens, width {dim}, {heads} heads, batch {batch}"
        rows[name] = compared(*kernels(tokens, dim, heads, batch), turns, STEPS)
    facts = {"first": "convolution; fused", "second": "products; written out, or step by step"}
    record("layers_cpu", facts | {"rows": rows})


if __name__ == "__main__":
    main()
