"""Pooling and resampling in a captured graph: means, maxima of windows, and images of another size."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certify.graph import resampling
from certify.graph.export import BATCH
from certify.graph.operations import linear, matmul, moved, scaled, two
from certify.graph.values import Unmapped, Value, materialised, step
from zoo.primitives.pooling import Mean, WindowMax


def mean(x: Value, dims: Any = (), keepdim: bool = False, **kwargs: Any) -> Value:
    axes = sorted(axis % len(x.shape) for axis in ((dims,) if isinstance(dims, int) else dims))
    if not axes or axes[0] == 0:
        raise Unmapped("a mean over the images of a batch")
    source = materialised(x)
    shape = tuple(side for axis, side in enumerate(x.shape) if axis and axis not in axes)
    y = Value.of(step(Mean(tuple(axes)), source, shape, "mean"))
    for axis in axes if keepdim else ():
        y = moved(torch.unsqueeze, y, axis)
    return y


def total(x: Value, dims: Any = (), keepdim: bool = False, **kwargs: Any) -> Value:
    axes = (dims,) if isinstance(dims, int) else dims
    count = torch.Size(x.shape[axis] for axis in axes).numel()
    return scaled(mean(x, dims, keepdim), count, 0, "count")


def adaptive_avg_pool2d(x: Value, size: Any) -> Value:
    sides = [own if side is None else side for own, side in zip(x.shape[2:], two(size), strict=True)]
    if sides == [1, 1]:
        return mean(x, (2, 3), keepdim=True)
    kernel = [own // side for own, side in zip(x.shape[2:], sides, strict=True)]
    if any(k * side != own for k, side, own in zip(kernel, sides, x.shape[2:], strict=True)):
        return _between(x, *resampling.adaptive(x, sides))
    return avg_pool2d(x, kernel)


def adaptive_avg_pool1d(x: Value, size: Any) -> Value:
    """Return the means of an image that is one pixel high."""
    side = size if isinstance(size, int) else size[0]
    y: Value = moved(torch.squeeze, adaptive_avg_pool2d(moved(torch.unsqueeze, x, -2), (1, side)), -2)
    return y


def adaptive_max_pool2d(x: Value, size: Any) -> tuple[Value]:
    """Return maxima of windows of one size."""
    sides = two(size)
    kernel = tuple(own // side for own, side in zip(x.shape[2:], sides, strict=True))
    if any(k * side != own for k, side, own in zip(kernel, sides, x.shape[2:], strict=True)):
        raise Unmapped("adaptive pooling by maxima whose windows differ in size")
    return (max_pool2d(x, kernel),)


def _between(x: Value, rows: Tensor, columns: Tensor) -> Value:
    """Return rows x columns^T, for every channel."""
    found: Value = matmul(rows, linear(x, columns))
    return found


def avg_pool2d(
    x: Value,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil: bool = False,
    count: bool = True,
    divisor: Any = None,
) -> Value:
    module = nn.AvgPool2d(two(kernel), two(stride) if stride else None, two(padding), ceil, count, divisor)
    source = materialised(x)
    shape = module(torch.zeros(1, *source.shape)).shape[1:]
    return Value.of(step(module, source, shape, "avg_pool"))


def max_pool2d(
    x: Value, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
) -> Value:
    """Return maxima of windows: copies of entries, then `WindowMax`. A place outside repeats one of its window."""
    source = materialised(x)
    channels, height, width = source.shape
    grid = torch.arange(source.numel).view(1, channels, height, width)
    k, s, p, d = two(kernel), two(stride or kernel), two(padding), two(dilation)
    out = F.max_pool2d(grid.double(), k, s, p, d, ceil).shape[2:]
    rows, columns = (_offsets(n, *rest) for n, *rest in zip(out, k, s, p, d, (height, width), strict=True))
    at = (rows[:, None, :, None] * width + columns[None, :, None, :]).flatten(2)  # (Y, X, K)
    index = (torch.arange(channels)[:, None, None, None] * height * width + at).expand(channels, *at.shape)
    whole = torch.arange(BATCH).view(-1, 1, 1, 1, 1) * source.numel + index
    return window_max(Value(source, whole), "max_pool")


def _offsets(outputs: int, kernel: int, stride: int, padding: int, dilation: int, side: int) -> Tensor:
    """Return the places (outputs, kernel) along one axis; places inside stand in, in turn, for those outside."""
    places = torch.arange(outputs)[:, None] * stride - padding + torch.arange(kernel) * dilation
    for row in places:
        inside = row[(row >= 0) & (row < side)]
        if not len(inside):
            raise Unmapped("a window outside the image")
        outside = (row < 0) | (row >= side)
        row[outside] = inside[torch.arange(int(outside.sum())) % len(inside)]
    return places


def window_max(x: Value, name: str = "max") -> Value:
    source = materialised(x)
    return Value.of(step(WindowMax(), source, source.shape[:-1], name))


POOLING: dict[str, Callable[..., Any]] = {
    "mean": mean, "sum": total,
    "adaptive_avg_pool1d": adaptive_avg_pool1d,
    "adaptive_avg_pool2d": adaptive_avg_pool2d, "_adaptive_avg_pool2d": adaptive_avg_pool2d,
    "adaptive_max_pool2d": adaptive_max_pool2d, "avg_pool2d": avg_pool2d, "max_pool2d": max_pool2d,
    "upsample_nearest2d": resampling.nearest,
    "upsample_bilinear2d": lambda x, *options: _between(x, *resampling.bilinear(x, *options)),
    "upsample_bicubic2d": lambda x, *options: _between(x, *resampling.bicubic(x, *options)),
}  # fmt: skip
