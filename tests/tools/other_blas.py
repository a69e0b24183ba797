"""Another machine's arithmetic on this one: `python -m pytest -p tests.tools.other_blas tests/...`.

    y' = y (1 + u s)

Here y is a sum that torch's kernels write (products of matrices, convolutions, reductions), u the distance from 1 to
the next number of y's type, and s in {-1, 0, 1}. s is 0 where y is exact on any machine: a whole number, or a sum of
whole numbers or of one term.

s depends on the shapes and strides of the terms and on the place in the result, like a BLAS that splits its sums by
shape: equal shapes give equal bits, other batch sizes do not. No library promises a test more than that. OTHER_BLAS=N
in the environment is another such machine.

Only code in the test's own process and thread is affected.
"""

import hashlib
import os
from collections.abc import Generator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
REDUCTIONS = {"sum", "mean", "linalg_vector_norm", "logsumexp"}
OTHERS = {
    "mv", "addmv", "dot", "convolution", "convolution_backward", "_softmax", "_log_softmax",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "native_layer_norm", "native_layer_norm_backward",
}  # fmt: skip
MACHINE = os.environ.get("OTHER_BLAS", "0")


@lru_cache(maxsize=4096)
def _factors(origin: tuple[object, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    digest = hashlib.sha256(f"{MACHINE}{origin}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return 1 + torch.finfo(dtype).eps * torch.randint(-1, 2, shape, generator=generator).to(dtype)


def _exact(name: str, parts: list[Tensor], y: Tensor) -> bool:
    one_term = (name in PRODUCTS and parts[-1].shape[-2] == 1) or (name in REDUCTIONS and parts[0].numel() == y.numel())
    return one_term or all(not part.is_floating_point() or torch.equal(part, part.round()) for part in parts)


class OtherBlas(TorchDispatchMode):
    """While active, this changes each sum by at most one unit in the last place, chosen by its shapes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in PRODUCTS | REDUCTIONS | OTHERS:
            parts = [part for part in args if isinstance(part, Tensor)]
            if any(type(part) not in (Tensor, torch.nn.Parameter) or part.device.type != "cpu" for part in parts):
                return result  # symbolic shapes, or tensors of another mode
            origin = (name, *((tuple(part.shape), part.stride()) for part in parts))
            for place, y in enumerate(result if isinstance(result, tuple) else (result,)):
                known = type(y) is Tensor and y.dtype in (torch.float32, torch.float64)
                if known and not _exact(name, parts, y):
                    factors = _factors((*origin, place), tuple(y.shape), y.dtype)
                    y.copy_(torch.where(y == y.round(), y, y * factors))
        return result


def pytest_configure() -> None:
    """Let certificates accept this mode, which they would refuse as a modified process."""
    from zoo.bounds import integrity

    active = integrity._get_current_dispatch_mode_stack
    integrity._get_current_dispatch_mode_stack = lambda: [mode for mode in active() if type(mode) is not OtherBlas]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run fixtures in the mode too."""
    with OtherBlas():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run the test itself in the mode."""
    with OtherBlas():
        return (yield)
