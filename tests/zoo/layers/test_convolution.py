"""The norm of a convolution as a map of whole images, against dense matrices."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.bounds.first_order import layer_of
from zoo.bounds.rule_table import NoRule
from zoo.layers.convolution import CellConv2d, CircularConv2d, conv_norm


def dense(conv: nn.Conv2d, height: int, width: int) -> Tensor:
    """Return the matrix of the linear part of a convolution on images of one size."""
    pixels = torch.eye(conv.in_channels * height * width, dtype=torch.float64)
    images = pixels.view(-1, conv.in_channels, height, width)
    with torch.no_grad():
        return (conv(images) - conv(torch.zeros_like(images))).flatten(1)


GEOMETRY = [
    (k, s, p, n)
    for k, s, p, n in product((1, 2, 3, 4, 5), (1, 2, 3), (0, 1, 2), ((5, 8), (10, 10)))
    if n[0] + 2 * p >= k
]


def test_the_norm_is_never_below_the_exact_one() -> None:
    """Test every kernel, stride and padding on images that are not square.

    The norm is tight where the image is much larger than the kernel, and exact where patches do not overlap.
    """
    torch.manual_seed(0)
    ratios = []
    for k, s, p, (height, width) in GEOMETRY:
        conv = nn.Conv2d(2, 3, k, s, p).double()
        exact = torch.linalg.matrix_norm(dense(conv, height, width), 2)
        size = conv(torch.zeros(1, 2, height, width, dtype=torch.float64)).shape[2:]
        ratio = float(conv_norm(conv.weight, (s, s), (size[0], size[1])) / exact)
        assert ratio >= 1, (k, s, p, height, width)
        if k <= s and p == 0:
            assert ratio <= 1 + 1e-8
        ratios.append(ratio)
    assert sorted(ratios)[len(ratios) // 2] < 1.1


def test_a_filter_that_passes_one_frequency_has_the_known_norm() -> None:
    """A box filter of 3 x 3 ones has the symbol 9 at frequency 0, which the circulant reaches at any image size."""
    box = torch.ones(1, 1, 3, 3)
    for n in (3, 8, 31):
        assert float(conv_norm(box, (1, 1), (n, n))) == pytest.approx(9, rel=1e-8)
        assert float(conv_norm(box, (1, 1), (n, n))) >= 9


@pytest.mark.parametrize(
    ("kernel", "dilation", "groups", "size"),
    [
        ((3, 3), (1, 1), 1, (6, 7)),
        ((5, 3), (1, 2), 1, (8, 5)),
        ((1, 5), (1, 1), 2, (3, 4)),
        ((7, 7), (1, 1), 1, (4, 3)),  # the kernel is larger than the image
        ((2, 1), (2, 1), 2, (3, 1)),
    ],
)
def test_around_the_image_the_norm_is_exact(
    kernel: tuple[int, int], dilation: tuple[int, int], groups: int, size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    conv = CircularConv2d(2, 4, kernel, dilation, groups).double()
    x = torch.randn(2, 2, *size, dtype=torch.float64)
    rows, columns = conv.margins
    padded = F.pad(x, (columns, columns, rows, rows), "circular")
    torch.testing.assert_close(conv(x), F.conv2d(padded, conv.weight, conv.bias, 1, 0, dilation, groups))
    _, bound = layer_of(conv)(x)
    exact = torch.linalg.matrix_norm(dense(conv, *size), 2)
    assert 1 <= float(bound(torch.ones(2).double())[0] / exact) <= 1 + 1e-8


def test_a_kernel_without_a_middle_goes_not_around() -> None:
    with pytest.raises(ValueError, match="middle"):
        CircularConv2d(2, 4, (2, 2))


def test_a_rectangular_stride() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, (3, 5), (2, 1), (1, 2)).double()
    exact = torch.linalg.matrix_norm(dense(conv, 9, 7), 2)
    bound = float(conv_norm(conv.weight, (2, 1), (5, 7)))
    assert float(exact) <= bound <= 1.2 * float(exact)


def test_a_large_grid_in_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(40, 30, 3)
    calls = []

    def counted(matrices: Tensor) -> Tensor:
        calls.append(len(matrices))
        return torch.linalg.matrix_norm(matrices, 2)

    monkeypatch.setattr("zoo.layers.convolution.sigma_upper", counted)
    norm = conv_norm(conv.weight, (1, 1), (60, 60))
    assert len(calls) > 1
    assert sum(calls) == 62 * 32
    symbols = torch.fft.fft2(conv.weight.detach().double(), (62, 62)).permute(2, 3, 0, 1)
    torch.testing.assert_close(norm, torch.linalg.matrix_norm(symbols, 2).max(), rtol=1e-9, atol=0)


def test_every_image_size_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, int]] = []

    def counted(weight: Tensor, stride: tuple[int, int], size: tuple[int, int], *more: Any, **named: Any) -> Tensor:
        measured.append(size)
        return conv_norm(weight, stride, size, *more, **named)

    monkeypatch.setattr("zoo.layers.convolution.conv_norm", counted)
    layer = layer_of(nn.Conv2d(2, 3, 3).double().requires_grad_(False))
    for size in (8, 8, 6, 8):
        layer(torch.rand(2, 2, size, size, dtype=torch.float64))
    assert measured == [(6, 6), (4, 4)]


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    ],
    ids=["same", "circular"],
)
def test_convolutions_without_a_proof_are_refused(conv: nn.Conv2d) -> None:
    with pytest.raises(NoRule, match="Conv2d"):
        layer_of(conv)


@pytest.mark.parametrize("size", [(8, 8), (11, 9)])
@pytest.mark.parametrize("geometry", [(4, 4, 0), (4, 2, 1), (6, 2, 0), (8, 4, 2), (3, 1, 1), (2, 2, 2)])
def test_by_products_it_is_the_same_function(geometry: tuple[int, int, int], size: tuple[int, int]) -> None:
    """Compare values, gradients, and gradients of the image's gradient, also where windows leave a rest."""
    kernel, stride, padding = geometry
    torch.manual_seed(0)
    products = CellConv2d(3, 5, kernel, stride, padding).double()
    convolution = nn.Conv2d(3, 5, kernel, stride, padding).double()
    convolution.load_state_dict(products.state_dict())
    found = []
    for conv in (products, convolution):
        x = torch.linspace(-1, 1, 2 * 3 * size[0] * size[1], dtype=torch.float64).view(2, 3, *size).requires_grad_()
        y = conv(x)
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append((y, slope, *torch.autograd.grad(slope.norm(), [x, *conv.parameters()])))
    torch.testing.assert_close(*found)


def test_a_kernel_that_is_no_multiple_of_its_stride_has_no_cells() -> None:
    with pytest.raises(ValueError, match="multiple"):
        CellConv2d(3, 5, 3, 2)
