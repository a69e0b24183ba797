"""Float64 computations done in float32, so that their float64 values can stand for the exact ones.

Bounds of rounding are in proportion to the unit round-off, which is 2^29 times larger.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from zoo.bounds.float_error import CREATE, MOVE

SCALES = {"log2", "ceil", "clamp", "clamp_min", "exp2"}  # choose a power of two, which float32 may be unable to hold
UNITS = 2.0**29 * (1 + 1e-3)  # float64 units in one of float32; gamma_k is slightly more than proportional


class InFloat32(TorchDispatchMode):
    """Every operation runs on float32 kernels; values between operations are stored in float64."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, options = func.overloadpacket.__name__, kwargs or {}
        floats = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.is_floating_point()]
        scaled = name in ("mul", "div") and any(_powers_of_two(x) for x in floats)
        if not floats or scaled or name in CREATE or name in MOVE or name in SCALES or name == "copy_":
            return func(*args, **options)
        if name == "add_":
            return args[0].copy_(_cast(torch.add(*_cast(args, torch.float32), **options), torch.float64))
        assert not name.endswith("_"), f"{name} writes where it stands; say here what it does"
        return _cast(func(*_cast(args, torch.float32), **_cast(options, torch.float32)), torch.float64)


def _powers_of_two(x: Tensor) -> bool:
    """Return whether a product with these numbers is exact: those are powers of two (curvature.py)."""
    return bool((x.frexp().mantissa == 0.5).all())


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, values)


def in_float32(v: Tensor) -> Tensor:
    """Round to the nearest float32 numbers."""
    return v.float().double()


def rounded_by(f: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    """Return f(v) in float32 minus f(v)."""
    exact = f(v)
    with InFloat32():
        found = f(v)
    return found - exact
