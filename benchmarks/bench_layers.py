"""Two ways to the same numbers: the patch embedding as a convolution and as one product with the patches
(zoo/layers/patches.py), and gated positions on the fused kernel and written out (zoo/attention/gpsa.py).

The two take turns, and the ratio is that of the medians of processor time. `image`: forward, and backward to the input
alone, as an attack does; `all`: forward, and backward to input and weights.

    python -m benchmarks.bench_layers [--turns 30]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.record import record
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.gpsa import GPSA
from zoo.layers.patches import PatchProjection

PATCHES = ((3, 126, 8, 32, 128), (3, 192, 4, 32, 64), (3, 384, 16, 224, 8))  # channels, width, patch, image, batch
POSITIONS = ((16, 126, 128), (64, 126, 32), (196, 432, 8))  # tokens, width, batch; 9 heads


def patches(chans: int, dim: int, patch: int, size: int, batch: int) -> tuple[nn.Module, nn.Module, Tensor]:
    convolution, product = (kind(chans, dim, patch, patch) for kind in (nn.Conv2d, PatchProjection))
    return convolution, product, torch.rand(batch, chans, size, size, requires_grad=True)


class Way(nn.Module):
    """GPSA by one of its two ways, whatever the number of tokens."""

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


def seconds(module: nn.Module, x: Tensor, whole: bool) -> float:
    """Of processor time."""
    inputs = [x, *module.parameters()] if whole else [x]
    start = time.process_time()
    torch.autograd.grad(module(x).sum(), inputs, allow_unused=True)
    return time.process_time() - start


def compared(first: nn.Module, second: nn.Module, x: Tensor, turns: int) -> dict[str, float]:
    """Medians of both in milliseconds, and first / second."""
    row: dict[str, float] = {}
    for name, whole in (("image", False), ("all", True)):
        times = [[seconds(module, x, whole) for module in (first, second)] for _ in range(turns + 2)][2:]
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
        rows[name] = compared(*patches(chans, dim, patch, size, batch), turns)
    for tokens, dim, batch in POSITIONS:
        rows[f"gated positions, {tokens} tokens, width {dim}, batch {batch}"] = compared(
            *positions(tokens, dim, batch), turns
        )
    record("layers_cpu", {"first": "convolution; fused", "second": "products; written out", "rows": rows})


if __name__ == "__main__":
    main()
