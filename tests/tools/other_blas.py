"""Another machine's arithmetic on this one: `python -m pytest -p tests.tools.other_blas tests/...`.

    y' = y (1 + u s),   u the distance from 1 to the next number of y's type,   s in {-1, 0, 1}

for every sum y that torch's kernels write: products of matrices, convolutions, reductions; but s = 0 where y is exact
on any machine, being a whole number, or made of whole numbers or of one term. s is drawn from the shapes and strides of
what the sum was made of and from its place in the result, as a BLAS that cuts its sums by them may: the same shapes
give the same bits, other batch sizes do not. No library promises a test more than that. OTHER_BLAS=N in the environment
is another such machine.

Only what runs in the test's own process and thread is changed.
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
    """While it is on, every sum is off by one unit in the last place, or not, by its shapes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in PRODUCTS | REDUCTIONS | OTHERS:
            parts = [part for part in args if isinstance(part, Tensor)]
            if any(type(part) not in (Tensor, torch.nn.Parameter) or part.device.type != "cpu" for part in parts):
                return result  # shapes without numbers, or tensors of another tool
            origin = (name, *((tuple(part.shape), part.stride()) for part in parts))
            for place, y in enumerate(result if isinstance(result, tuple) else (result,)):
                known = type(y) is Tensor and y.dtype in (torch.float32, torch.float64)
                if known and not _exact(name, parts, y):
                    factors = _factors((*origin, place), tuple(y.shape), y.dtype)
                    y.copy_(torch.where(y == y.round(), y, y * factors))
        return result


def pytest_configure() -> None:
    """Another machine is no fault of the process, which certificates refuse."""
    from zoo.bounds import integrity

    active = integrity._get_current_dispatch_mode_stack
    integrity._get_current_dispatch_mode_stack = lambda: [mode for mode in active() if type(mode) is not OtherBlas]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fixtures too."""
    with OtherBlas():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """The test itself."""
    with OtherBlas():
        return (yield)
