"""Every enclosure holds: ascent over the box finds no point below the linear bound, and no value outside the box."""

import pytest
import torch
from torch import Tensor, nn

from certify.linear.enclosures.products import Product
from certify.linear.enclosures.scalars import Convex, Elementwise, Scalar
from certify.linear.enclosures.softmax import Softmax
from certify.linear.enclosures.steps import Box, Step
from certify.linear.functions import EXP, RECIPROCAL, RSQRT, SQUARE, known
from tests.tools.ascent import ascend_box
from zoo.primitives.activations import Abs

FOUND = 1e-11  # rounding of the search itself, relative to the terms
ACTIVATIONS = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, Abs, nn.Hardtanh, nn.ReLU6, nn.Hardswish,
    nn.Hardsigmoid, nn.ELU,
)  # fmt: skip
SCALARS: dict[str, Scalar | Convex] = {
    **{kind.__name__: known(kind()) for kind in ACTIVATIONS},
    "clamp": Scalar(lambda z: z.clamp(-0.3, 0.9), (0.0, 1.0), (-0.3, 0.9)),
    "square": SQUARE,
    "exp": EXP,
    "rsqrt": RSQRT,
    "reciprocal": RECIPROCAL,
}
POSITIVE = ("rsqrt", "reciprocal")


def boxes_of(shape: tuple[int, ...], count: int, seed: int, positive: bool = False) -> Box:
    """Return boxes of every width, from a point to 20, around numbers of every size."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(count, *shape, generator=generator, dtype=torch.float64)

    scale = 10 ** (2 * draw().clamp(-2, 0.5))
    width = torch.where(draw() < -1.5, 0.0, 10 ** (2 * draw().clamp(-3, 0.6)))
    lower = draw() * scale
    if positive:
        lower = lower.abs() + 1e-3
    return Box(lower, lower + width)


def worst(step: Step, boxes: tuple[Box, ...], a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least <a, y> minus its bound that ascent finds, and the size of the terms: (B,) both."""
    found = step.relaxed(*boxes).back(a.unsqueeze(1))
    shapes = [box.lower.shape[1:] for box in boxes]
    sizes = [shape.numel() for shape in shapes]
    lower, upper = (
        torch.cat([end.flatten(1) for end in ends], 1)
        for ends in ([box.lower for box in boxes], [box.upper for box in boxes])
    )
    parts = torch.cat([part.flatten(1) for part in found.parts], 1)
    const = (found.const - found.rounding).squeeze(1)
    copies = 6

    def below(s: Tensor) -> Tensor:
        x = (lower.repeat(copies, 1) + upper.repeat(copies, 1)) / 2 + s * (upper - lower).repeat(copies, 1) / 2
        x = torch.minimum(torch.maximum(x, lower.repeat(copies, 1)), upper.repeat(copies, 1))
        y = step.value(*(part.unflatten(1, shape) for part, shape in zip(x.split(sizes, 1), shapes, strict=True)))
        bound = (parts.repeat(copies, 1) * x).sum(1) + const.repeat(copies)
        return bound - (a.repeat(copies, *(1,) * (a.ndim - 1)) * y).flatten(1).sum(1)

    gap = -ascend_box(below, torch.zeros_like(lower), torch.ones(len(a), dtype=a.dtype), steps=25, starts=3)
    size = (parts.abs() * torch.maximum(lower.abs(), upper.abs())).sum(1) + const.abs()
    return gap, size


def assert_holds(step: Step, boxes: tuple[Box, ...], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = len(boxes[0].lower)
    a = torch.randn(count, *step.shape, generator=generator, dtype=torch.float64)
    gap, size = worst(step, boxes, a)
    assert (gap >= -FOUND * (1 + size)).all()
    y_box = step.box(*boxes)
    for _ in range(20):
        xs = [
            box.lower + (box.upper - box.lower) * torch.rand(box.lower.shape, generator=generator).round(decimals=1)
            for box in boxes
        ]
        y = step.value(*(torch.minimum(x, box.upper) for x, box in zip(xs, boxes, strict=True)))
        assert ((y_box.lower <= y) & (y <= y_box.upper)).all()


@pytest.mark.parametrize("name", SCALARS)
def test_lines_enclose_the_function(name: str) -> None:
    boxes = boxes_of((6,), 200, 0, name in POSITIVE)
    if name == "exp":
        boxes = Box(boxes.lower.clamp(max=30), boxes.upper.clamp(max=30))
    assert_holds(Elementwise((0,), (6,), SCALARS[name]), (boxes,), 1)


@pytest.mark.parametrize("name", [name for name, f in SCALARS.items() if isinstance(f, Scalar)])
def test_lines_touch_the_function(name: str) -> None:
    """No line could be raised by more than a share of what the function bends."""
    f = SCALARS[name]
    box = Box(torch.linspace(-3, 1, 50).double(), torch.linspace(-2.5, 4, 50).double())
    lines = Elementwise((0,), (50,), f).relaxed(Box(box.lower[None], box.upper[None]))
    z = box.lower + (box.upper - box.lower) * torch.linspace(0, 1, 3001).double()[:, None]
    above = (f.f(z) - lines.lower[0] * z - lines.lower[1]).amin(0)
    below = (lines.upper[0] * z + lines.upper[1] - f.f(z)).amin(0)
    assert (torch.maximum(above, below) <= 0.002 * (box.upper - box.lower)).all()
    assert (torch.minimum(above, below) >= 0).all()


def test_relu_has_the_lines_of_crown() -> None:
    box = Box(torch.tensor([[-1.0, -3.0, 0.5, -2.0]]).double(), torch.tensor([[2.0, 1.0, 2.0, -1.0]]).double())
    lines = Elementwise((0,), (4,), SCALARS["ReLU"]).relaxed(box)
    torch.testing.assert_close(lines.lower[0], torch.tensor([[1.0, 0, 1, 0]]).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        lines.upper[0], torch.tensor([[2 / 3, 1 / 4, 1, 0]], dtype=torch.float64), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(("matrices", "weights"), [(False, False), (True, False), (True, True)])
def test_planes_enclose_products(matrices: bool, weights: bool) -> None:
    shapes = ((2, 3), (3, 2)) if matrices else ((4,), (4,))
    step = Product((0, 1), (2, 2) if matrices else (4,), matrices, 4, weights)
    assert_holds(step, (boxes_of(shapes[0], 200, 2), boxes_of(shapes[1], 200, 3)), 4)


@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
def test_planes_enclose_the_softmax(scale: float) -> None:
    box = boxes_of((2, 5), 300, 5)
    box = Box((scale * box.lower / 10).clamp(-100, 100), (scale * box.upper / 10).clamp(-100, 100))
    assert_holds(Softmax((0,), (2, 5)), (box,), 6)


def test_functionals_of_a_softmax_may_be_shifted() -> None:
    """The weights add up to 1, so that a constant functional is exact."""
    box = boxes_of((5,), 50, 7)
    box = Box(box.lower.clamp(-20, 20), box.upper.clamp(-20, 20))
    found = Softmax((0,), (5,)).relaxed(box).back(torch.full((50, 1, 5), 3.0).double())
    least = (
        found.const
        - (found.parts[0].abs() * box.reach.unsqueeze(1)).sum(-1)
        + found.parts[0].squeeze(1).mul(box.centre).sum(-1, keepdim=True)
    )
    assert (least >= 3 - 1e-9).all()


@pytest.mark.parametrize("change", ["slope", "shift"])
def test_the_search_finds_a_wrong_enclosure(change: str) -> None:
    """Lines that are off by 1 % of what they leave fail."""
    step = Elementwise((0,), (6,), SCALARS["GELU"])
    boxes = boxes_of((6,), 200, 0)
    lines = step.relaxed(boxes)
    a = torch.ones(200, 6, dtype=torch.float64)

    class Wrong:
        inputs, shape, tight = (0,), (6,), True

        def value(self, *xs: Tensor) -> Tensor:
            return step.value(*xs)

        def box(self, *given: Box) -> Box:
            return step.box(*given)

        def relaxed(self, *given: Box) -> object:
            slope, shift = lines.lower
            wrong = (slope + 0.02, shift) if change == "slope" else (slope, shift + 0.01)
            return type(lines)(wrong, lines.upper, lines.box)

    gap, size = worst(Wrong(), (boxes,), a)  # type: ignore[arg-type]
    assert (gap < -FOUND * (1 + size)).any()
