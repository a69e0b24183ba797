"""Operations that rearrange entries, join tensors, or pad with constants."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from certify.linear.program import Lacking, Program, Ref, affine

# operations that put every entry into one place at most
ONCE = (
    "permute", "transpose", "t", "movedim", "select", "slice", "unsqueeze",
    "squeeze", "unbind", "split", "split_with_sizes", "chunk", "flip", "roll", "flatten", "unflatten", "narrow",
    "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "swapaxes", "numpy_T", "view_as", "reshape_as", "rot90",
    "diagonal", "clone", "alias", "contiguous", "detach", "lift_fresh_copy",
)  # fmt: skip
OFTEN = ("expand", "expand_as", "repeat", "index_select", "index", "repeat_interleave", "tile", "unfold")


def moved(program: Program, target: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Add a step that rearranges the entries of x."""
    args = tuple(torch.zeros(arg.shape) if isinstance(arg, Ref) else arg for arg in args)
    if isinstance(x, Tensor):
        return target(x, *args, **kwargs)
    made = target(program.zeros(x.shape), *args, **kwargs)
    if isinstance(made, Tensor):
        return _moved(program, x, lambda t: target(t, *args, **kwargs), made.numel())
    return [_moved(program, x, lambda t, k=k: target(t, *args, **kwargs)[k], 0) for k in range(len(made))]


def reshaped(program: Program, target: Any, x: Ref, shape: Sequence[int]) -> Any:
    """Reshape x; a view of it would depend on how a batch is laid out."""
    given = x.shape
    return affine(program, (x,), lambda t: t.reshape(shape), moves=True, pull=lambda a: (a.reshape(len(a), *given),))


def _moved(program: Program, x: Ref, apply: Callable[..., Tensor], most: int) -> Ref:
    return affine(program, (x,), apply, terms=most if most > math.prod(x.shape) else 0, moves=True)


def repeated(program: Program, target: Any, x: Ref, *args: Any, **kwargs: Any) -> Any:
    """Add a step that copies entries; its transpose adds them up."""
    if isinstance(x, Tensor):
        raise Lacking("an index that depends on the image has none")
    args = tuple(torch.zeros(arg.shape) if isinstance(arg, Ref) else arg for arg in args)
    made = target(program.zeros(x.shape), *args, **kwargs)
    return affine(program, (x,), lambda t: target(t, *args, **kwargs), terms=made.numel(), moves=True)


def same(program: Program, target: Any, x: Ref, *args: Any, **kwargs: Any) -> Ref:
    dtype = kwargs.get("dtype") or next((arg for arg in args if isinstance(arg, torch.dtype)), torch.float64)
    if True in args or kwargs.get("train") or dtype is not torch.float64:
        raise Lacking("active dropout, or a cast to another type, has none")
    return x


def cat(program: Program, target: Any, parts: Sequence[Any], dim: int = 0) -> Ref:
    return _joined(program, torch.cat, parts, dim)


def stack(program: Program, target: Any, parts: Sequence[Any], dim: int = 0) -> Ref:
    return _joined(program, torch.stack, parts, dim)


def _joined(program: Program, join: Callable[..., Tensor], parts: Sequence[Any], dim: int) -> Ref:
    refs = list(dict.fromkeys(part for part in parts if isinstance(part, Ref)))

    def apply(*xs: Tensor) -> Tensor:
        given = dict(zip(refs, xs, strict=True))
        return join([given[part] if isinstance(part, Ref) else part for part in parts], dim)

    constant = apply(*(program.zeros(ref.shape) for ref in refs))
    offset = constant if any(isinstance(part, Tensor) for part in parts) else None
    terms = len(parts) if len(refs) < sum(isinstance(part, Ref) for part in parts) else 0
    return affine(program, refs, apply, terms=terms, offset=offset, moves=True)


def pad(program: Program, target: Any, x: Ref, pads: Sequence[int], mode: Any = "constant", value: Any = None) -> Ref:
    value = value if isinstance(mode, str) else mode
    if isinstance(mode, str) and mode != "constant":
        raise Lacking(f"padding by {mode} has none")
    fill = float(value or 0)
    offset = F.pad(program.zeros(x.shape), list(pads), value=fill) if fill else None
    return affine(program, (x,), lambda t: F.pad(t, list(pads), value=fill), offset=offset, moves=True)
