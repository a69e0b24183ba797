"""Enclosures that know their input as a function of the image hold on all images: ascent finds none below."""

import pytest
import torch
from torch import Tensor

from certify.linear.enclosures.forms import Form
from certify.linear.enclosures.products import Product
from certify.linear.enclosures.softmax import Softmax
from certify.linear.enclosures.steps import Box, Relaxed, Step
from tests.tools.ascent import ascend_box

COUNT, H, ROWS, J, D, N = 60, 2, 2, 4, 3, 5
COPIES = 6


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def formed(shape: tuple[int, ...], l2: bool, seed: int) -> Box:
    """Return boxes of every width with a form that has more slope than rest."""
    scale = 10 ** draw(COUNT, *(1,) * len(shape), seed=seed).clamp(-2, 0.7)
    slope = draw(COUNT, *shape, N, seed=seed + 1) * scale.unsqueeze(-1)
    lower, wide = (scale * draw(COUNT, *shape, seed=seed + k) for k in (2, 3))
    form = Form(slope, lower, lower + 0.2 * wide.abs(), l2)
    far = torch.linalg.vector_norm(slope, 2 if l2 else 1, -1) * (1 + 1e-12)
    return Box(form.lower - far, form.upper + far, form)


def at(box: Box, s: Tensor) -> Tensor:
    """Return the tensor at s in [-1,1]: the first N are the image, others the place in the rest."""
    form = box.form
    assert form is not None
    z, place = s[:, :N], s[:, N:].reshape(len(s), *box.lower.shape[1:])
    if form.l2:
        z = z / torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_min(1)
    lower, upper, slope = (t.repeat(COPIES, *(1,) * (t.ndim - 1)) for t in (form.lower, form.upper, form.slope))
    return (slope * z.view(len(z), *(1,) * (slope.ndim - 2), N)).sum(-1) + (lower + upper + place * (upper - lower)) / 2


def assert_holds(step: Step, boxes: tuple[Box, ...], a: Tensor, free: bool = False) -> Tensor:
    """Search for an image where <a, y> is below its bound, and return the least that is left."""
    shares = torch.full((COUNT, 1, *boxes[0].lower.shape[1:]), 0.5, dtype=torch.float64)
    back = step.relaxed(*boxes).back(a.unsqueeze(1), (shares,) if free else ())
    sizes = [box.lower[0].numel() + (N if box.form else 0) for box in boxes]

    def below(s: Tensor) -> Tensor:
        xs = []
        for part, box in zip(s.split(sizes, 1), boxes, strict=True):
            lower, upper = (end.repeat(COPIES, *(1,) * (end.ndim - 1)) for end in (box.lower, box.upper))
            xs.append(at(box, part) if box.form else (lower + upper + part.view_as(lower) * (upper - lower)) / 2)
        bound = (back.const - back.rounding)[:, 0].repeat(COPIES)
        for part, x in zip(back.parts, xs, strict=True):
            bound = bound + (part[:, 0].repeat(COPIES, *(1,) * (x.ndim - 1)) * x).flatten(1).sum(1)
        return bound - (a.repeat(COPIES, *(1,) * (a.ndim - 1)) * step.value(*xs)).flatten(1).sum(1)

    start = torch.zeros(COUNT, sum(sizes)).double()
    left = -ascend_box(below, start, torch.ones(COUNT).double(), steps=40, starts=COPIES // 2)
    size = back.const.abs()[:, 0]
    for part, box in zip(back.parts, boxes, strict=True):
        size = size + (part[:, 0].abs() * box.size).flatten(1).sum(1)
    assert (left >= -1e-11 * (1 + size)).all()
    return left / (1 + size)


@pytest.mark.parametrize("l2", [False, True])
def test_sums_are_reached(l2: bool) -> None:
    """The ends of <a, y> are those of slopes and rest, to 1e-5 of the terms."""
    box, a = formed((H, J, D), l2, 0), draw(COUNT, 3, H, ROWS, D, seed=9)
    a[:, 1, :, 0] = 0
    assert box.form is not None
    low, high = box.form.sums(a)
    slope = torch.einsum("brhid,bhjdn->brhijn", a, box.form.slope)
    far = torch.linalg.vector_norm(slope, 2 if l2 else 1, -1)
    above, below = a.clamp(min=0), a.clamp(max=0)
    least = above @ box.form.lower.mT.unsqueeze(1) + below @ box.form.upper.mT.unsqueeze(1) - far
    most = above @ box.form.upper.mT.unsqueeze(1) + below @ box.form.lower.mT.unsqueeze(1) + far
    size = a.abs() @ box.size.mT.unsqueeze(1)
    for over in (least - low, high - most):
        assert (over >= 0).all()
        assert (over <= 1e-5 * size + 1e-20).all()


def test_one_form_serves_many_parts() -> None:
    box = formed((H, J, D), False, 0)
    form = box.form
    assert form is not None
    one = Form(form.slope[:1], form.lower[:1], form.upper[:1], False)
    a = draw(3, 2, H, ROWS, D, seed=1)
    for part, low, high in zip(a, *one.sums(a), strict=True):
        alone = one.sums(part.unsqueeze(0))
        torch.testing.assert_close((low, high), (alone[0][0], alone[1][0]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("l2", [False, True])
def test_planes_of_sums_hold(l2: bool, free: bool) -> None:
    lower = draw(COUNT, H, ROWS, J, seed=3).abs() / J
    weights = Box(lower, lower + draw(COUNT, H, ROWS, J, seed=4).abs() / J)
    step = Product((0, 1), (H, ROWS, D), True, 8, weights=True)
    boxes = (weights, formed((H, J, D), l2, 20))
    a = draw(COUNT, H, ROWS, D, seed=5)
    left = assert_holds(step, boxes, a, free)
    assert left.median() < 0.3


@pytest.mark.parametrize("l2", [False, True])
def test_planes_of_a_softmax_hold(l2: bool) -> None:
    assert_holds(Softmax((0,), (H, J)), (formed((H, J), l2, 30),), draw(COUNT, H, J, seed=6))


def test_the_search_finds_a_form_that_is_wrong() -> None:
    """Rests that are 10 % too small fail."""
    box = formed((H, J, D), False, 20)
    form = box.form
    assert form is not None
    less = Form(0.9 * form.slope, form.lower, form.upper, False)
    weights = Box(torch.zeros(COUNT, H, ROWS, J).double(), torch.ones(COUNT, H, ROWS, J).double())
    step = Product((0, 1), (H, ROWS, D), True, 8, weights=True)

    class Wrong(Product):
        def relaxed(self, *boxes: Box) -> Relaxed:  # type: ignore[override]
            return step.relaxed(boxes[0], Box(boxes[1].lower, boxes[1].upper, less))

    with pytest.raises(AssertionError):
        assert_holds(
            Wrong((0, 1), (H, ROWS, D), True, 8, weights=True), (weights, box), draw(COUNT, H, ROWS, D, seed=5)
        )
