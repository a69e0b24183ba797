"""Running error bounds are never below the error that 64 bits of mantissa show, and close where nothing cancels.

Operations without a bound are refused.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certizoo import UserError
from zoo.bounds import float_error

N, D = 5, 8
WEIGHT = torch.randn(D, D, generator=torch.Generator().manual_seed(1)).double()
BIAS = torch.randn(D, generator=torch.Generator().manual_seed(2)).double()
KERNEL = torch.randn(3, 2, 3, 3, generator=torch.Generator().manual_seed(3)).double()
LONG: Any = np.longdouble


def long(t: Tensor) -> Any:
    return t.numpy().astype(LONG)


def softmax(s: Any) -> Any:
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def layer_norm(x: Any) -> Any:
    c = x - x.mean(-1, keepdims=True)
    return c / np.sqrt((c * c).mean(-1, keepdims=True) + LONG(1e-5)) * long(WEIGHT[0]) + long(BIAS)


def attention(x: Any) -> Any:
    q, k, v = x @ long(WEIGHT), x @ long(WEIGHT.mT), x
    return softmax(q @ np.swapaxes(k, -1, -2) / np.sqrt(LONG(D))) @ v


def convolution(x: Any) -> Any:
    rows = [[(x[:, :, i : i + 3, j : j + 3][:, None] * long(KERNEL)).sum((2, 3, 4)) for j in (0, 1)] for i in (0, 1)]
    return np.stack([np.stack(row, -1) for row in rows], -2) + long(BIAS[:3])[:, None, None]


def gelu(x: Any) -> Any:
    """Compute GELU to a few float64 units, of which the bound allows eighty."""
    return np.vectorize(lambda z: z * math.erfc(-z / math.sqrt(2)) / 2)(x.astype(np.float64)).astype(LONG)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def patches(x: Tensor) -> Tensor:
    return F.conv2d(x[:, None, :4, :4].expand(-1, 2, 4, 4), KERNEL, BIAS[:3])


def squares(x: Any) -> Any:
    return (x * x).sum(-1, keepdims=True)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Any], Any]]] = {
    "linear": (lambda x: F.linear(x, WEIGHT, BIAS), lambda x: x @ long(WEIGHT.mT) + long(BIAS)),
    "two": (lambda x: F.linear(x, WEIGHT, BIAS) @ WEIGHT, lambda x: (x @ long(WEIGHT.mT) + long(BIAS)) @ long(WEIGHT)),
    "centred": (centred, lambda x: x - x.mean(-1, keepdims=True)),
    "there and back": (lambda x: (x + 2.0**30) * 3 - 3 * 2.0**30, lambda x: 3 * x),
    "layer norm": (lambda x: F.layer_norm(x, (D,), WEIGHT[0], BIAS, 1e-5), layer_norm),
    "softmax": (lambda x: (20 * x).softmax(-1), lambda x: softmax(20 * x)),
    "attention": (lambda x: F.scaled_dot_product_attention(x @ WEIGHT, x @ WEIGHT.mT, x), attention),
    "quotient": (lambda x: x / (1 + x.square().sum(-1, keepdim=True)), lambda x: x / (1 + squares(x))),
    "length": (
        lambda x: x / centred(x).norm(dim=-1, keepdim=True),
        lambda x: x / np.sqrt(squares(x - x.mean(-1, keepdims=True))),
    ),
    "inverse root": (lambda x: (1 + x.square()).rsqrt(), lambda x: 1 / np.sqrt(1 + x * x)),
    "root": (lambda x: (1 + x.square()).sqrt(), lambda x: np.sqrt(1 + x * x)),
    "functions": (lambda x: x.tanh() + x.sigmoid() * x.exp(), lambda x: np.tanh(x) + np.exp(x) / (1 + np.exp(-x))),
    "gelu": (F.gelu, gelu),
    "choices": (lambda x: torch.maximum(x.relu(), -x).clamp(max=0.5), lambda x: np.minimum(np.abs(x), LONG(0.5))),
    "convolution": (patches, lambda x: convolution(np.repeat(x[:, None, :4, :4], 2, 1))),
}


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e9])
@pytest.mark.parametrize("name", CASES)
def test_the_bound_is_above_the_error(name: str, offset: float) -> None:
    f, exact = CASES[name]
    scale = 1e-7 if name == "functions" and offset else 1.0  # where exp does not overflow
    x = (torch.randn(6, N, D, generator=torch.Generator().manual_seed(0)).double() + offset) * scale
    y = f(x)
    error = np.abs(y.numpy().astype(LONG) - exact(long(x))).astype(np.float64)
    bound = float_error.defect(f, x, y)
    assert (torch.from_numpy(error) <= bound).all()
    if offset == 0 and name != "there and back":
        assert (bound <= 1e-11).all()


def test_images_do_not_change_each_other() -> None:
    f = CASES["attention"][0]
    x = torch.randn(20, N, D, generator=torch.Generator().manual_seed(0)).double()
    x[3] *= 1e6
    alone = torch.cat([float_error.defect(f, one, f(one)) for one in x.split(1)])
    together = float_error.defect(f, x, f(x))
    torch.testing.assert_close(together, alone, rtol=0.5, atol=1e-14)


def test_a_link_without_steps_keeps_the_rounding_of_the_step_before_it() -> None:
    x = torch.randn(6, N, D, generator=torch.Generator().manual_seed(0)).double()
    links: list[Callable[[Tensor], Tensor]] = [nn.Identity(), CASES["linear"][0], nn.Identity()]
    (found,) = float_error.defects(links, [0, 1, 1], [x, links[1](x)])
    (alone,) = float_error.defects(links[1:2], [1], [x, links[1](x)])
    assert (alone > 0).all()
    assert torch.equal(found, alone)


def test_what_has_no_bound_is_refused() -> None:
    x = torch.rand(2, 3).double()
    with pytest.raises(UserError, match="erfinv"):
        float_error.defect(torch.erfinv, x, x)
    with pytest.raises(UserError, match="float64 throughout"):
        float_error.defect(lambda z: (z.float() * 2).double(), x, 2 * x)


def test_a_denominator_that_may_be_zero_bounds_nothing() -> None:
    x = torch.full((1, 2), 1e9).double()
    assert float_error.defect(lambda z: 1 / (z - z.mean(-1, keepdim=True)), x, x).isinf().all()
