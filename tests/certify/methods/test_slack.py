"""Deliberate rounding: offsets that cancel in exact arithmetic, placed where they swallow the deciding digits.

The model with an offset and the one without are the same function, so the latter tells the truth about the former.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from certify import certified_radius
from certify.adjoint.adjoint import Adjoint
from certify.methods.lofast import LocalLoFAST, LoFAST
from certify.shared.bake import bake, logit_differences
from certizoo import UserError
from tests.tools.ascent import ascend
from tests.tools.cases import mostly_slow
from tests.tools.grid_models import IMAGES, plain
from zoo.bounds import float_error

METHODS = {"lofast": LoFAST, "lofast_local": LocalLoFAST, "adjoint": Adjoint}


def compensated(bias: nn.Parameter, layer: Any, offset: float, rows: slice = slice(None)) -> None:
    """Add the offset to one input entry of `layer`, and subtract its effect after the layer."""
    bias[0] += offset
    layer.bias[rows] -= offset * layer.weight[rows, 0]


def head_bias(model: Any, o: float) -> None:
    """Add the offset to all logits."""
    model.head.bias += o


def patch_bias(model: Any, o: float) -> None:
    """Add the offset to every entry of every token, which LayerNorm removes."""
    model.patch_embed.proj.bias += o


def positions(model: Any, o: float) -> None:
    model.pos_embed += o


def class_token(model: Any, o: float) -> None:
    model.cls_token += o


def stream_behind_attention(model: Any, o: float) -> None:
    model.blocks[0].attn.proj.bias += o


def stream_behind_mlp(model: Any, o: float) -> None:
    model.blocks[0].mlp.fc2.bias += o


def norm_before_attention(model: Any, o: float) -> None:
    compensated(model.blocks[0].norm1.bias, model.blocks[0].attn.qkv, o)


def norm_before_mlp(model: Any, o: float) -> None:
    compensated(model.blocks[0].norm2.bias, model.blocks[0].mlp.fc1, o)


def last_norm(model: Any, o: float) -> None:
    compensated(model.norm.bias, model.head, o)


def keys(model: Any, o: float) -> None:
    """Add the same offset to all keys, to which a softmax is invariant."""
    model.blocks[0].attn.qkv.bias[16:32] += o


def values(model: Any, o: float) -> None:
    """Add the offset to all values, since the weights of a softmax sum to 1."""
    attn = model.blocks[0].attn
    attn.qkv.bias[32] += o
    attn.proj.bias -= o * attn.proj.weight[:, 0]


PLACES: tuple[Callable[[Any, float], None], ...] = (
    head_bias,
    patch_bias,
    positions,
    class_token,
    stream_behind_attention,
    stream_behind_mlp,
    norm_before_attention,
    norm_before_mlp,
    last_norm,
    keys,
    values,
)
OFFSETS = (2.0**24, 2.0**32, 2.0**40)
LARGEST = mostly_slow(OFFSETS, OFFSETS[-1])


def pair_of(place: Callable[[Any, float], None], offset: float) -> tuple[Any, Any]:
    """Return the model that tells the truth, and the same function with the offset."""
    truth = plain(global_pool="cls" if place is class_token else "avg")
    other = copy.deepcopy(truth)
    with torch.no_grad():
        place(other, offset)
    return truth, other


def at_the_border(truth: Any, count: int) -> Tensor:
    """Return images with margins from 1e-1 to 1e-9 between the first two classes, on both sides."""
    label = truth(IMAGES).argmax(-1)
    a, b = IMAGES[label == label[0]][:count], IMAGES[label != label[0]][:count]
    label_B = truth(a).argmax(-1)
    low, high = torch.zeros(len(a), 1, 1, 1).double(), torch.ones(len(a), 1, 1, 1).double()
    for _ in range(50):
        middle = (low + high) / 2
        same = (truth(a + middle * (b - a)).argmax(-1) == label_B)[:, None, None, None]
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    steps = torch.logspace(-1, -9, len(a)).double()[:, None, None, None]
    return torch.cat([a + (low - steps).clamp(0, 1) * (b - a), a + (low + steps).clamp(0, 1) * (b - a)])


def margin(model: Any, y: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the smallest margin of the label."""

    def smallest(x: Tensor) -> Tensor:
        logits, labels = model(x), y.repeat(len(x) // len(y))[:, None]
        return logits.gather(1, labels).squeeze(1) - logits.scatter(1, labels, -torch.inf).amax(1)

    return smallest


def lies(place: Callable[[Any, float], None], offset: float, method: str) -> tuple[int, int]:
    """Count the certified images at the border, and those certified wrongly.

    An image is wrong if the exact function has another label within 0.999 of its radius.
    """
    truth, other = pair_of(place, offset)
    with torch.no_grad():
        x = at_the_border(truth, 12)
        y = bake(other)(x).argmax(-1)
    radius_B = certified_radius(other, x, y, method=method, nonce="n")
    of_truth = margin(truth, y)
    least_B = -ascend(lambda z: -of_truth(z), x, 0.999 * radius_B, steps=20, starts=2)
    with torch.no_grad():
        least_B = torch.minimum(least_B, of_truth(x))
    return int((radius_B > 0).sum()), int(((least_B <= 0) & (radius_B > 0)).sum())


@pytest.mark.hostile
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("offset", LARGEST, ids=("2^24", "2^32", "2^40"))
@pytest.mark.parametrize("place", mostly_slow(PLACES, *list(PLACES)[::3]), ids=lambda place: place.__name__)
def test_an_offset_that_cancels_certifies_nothing_false(
    place: Callable[[Any, float], None], offset: float, method: str
) -> None:
    _, wrong = lies(place, offset, method)
    assert wrong == 0


@pytest.mark.hostile
@pytest.mark.parametrize("offset", LARGEST, ids=("2^24", "2^32", "2^40"))
@pytest.mark.parametrize("place", mostly_slow(PLACES, *list(PLACES)[::3]), ids=lambda place: place.__name__)
def test_margins_minus_the_cost_of_defects_are_below_the_true_ones(
    place: Callable[[Any, float], None], offset: float
) -> None:
    """Without an offset the loss of margin is negligible."""
    truth, other = pair_of(place, offset)
    with torch.no_grad():
        x = at_the_border(truth, 12)
        y = bake(other)(x).argmax(-1)
    true_B = margin(truth, y)(x).detach()
    (index_I, analysis), *_ = Adjoint(other).analyse(x, y).parts
    at_0 = analysis.at(0.0)
    assert (at_0.margin_B - at_0.loss_B <= true_B[index_I]).all()
    (index_I, analysis), *_ = Adjoint(truth).analyse(x, margin_labels(truth, x)).parts
    at_0 = analysis.at(0.0)
    assert (at_0.loss_B < 1e-9).all()


def margin_labels(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).argmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize("reserve", [0.0, 1e-5, 1e-3])
def test_the_attacks_find_a_prover_that_forgets_rounding(reserve: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted provers use slack that follows only the margin, and slack that is too small."""
    monkeypatch.setattr(float_error, "RESERVE", reserve)
    found = [lies(place, 2.0**40, "adjoint") for place in PLACES]
    assert sum(wrong > 0 for _, wrong in found) >= 5


def test_models_without_offsets_are_certified_at_the_border() -> None:
    assert lies(lambda model, o: None, 1.0, "adjoint")[0] >= 12


@pytest.mark.hostile
@pytest.mark.parametrize("offset", [2.0**14, 2.0**20, 2.0**24])
@pytest.mark.parametrize(("classes", "sign"), [(slice(None), 1), (slice(2, 3), -1)], ids=["all", "one far below"])
def test_huge_logits_of_one_image_do_not_excuse_another(classes: slice, sign: int, offset: float) -> None:
    """Margins differ by a deciding amount while all classes, or one class, have large logits."""
    model = plain().float()
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.head.bias[classes] += sign * offset
    baked: Any = bake(model)
    with torch.no_grad():
        baked.head.bias[0] += 0.5
    with pytest.raises(UserError, match="does not reproduce"):
        logit_differences(model, baked, x)
