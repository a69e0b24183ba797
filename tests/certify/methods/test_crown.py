"""The interface to auto_LiRPA: the traced model is the same function, and anything short of a proof is `unknown`."""

import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from benchmarks.vnncomp import vit
from certify import certified_radius, certify
from certify.methods import crown as door
from certify.methods.crown import Crown, Plain, plain
from certify.shared.bake import bake
from certify.shared.certificate import decide, lowered
from tests.tools.ascent import ascend, margin_loss
from tests.tools.exported_vit import exported, published_vit
from tests.tools.small_models import PARTS, THREE_HEADS, labelled, small_model

GAIN = 2.0  # the loss per unit of eps that the stand-in claims for every margin
Answer = Callable[[Tensor, float], Tensor]


@dataclass
class StandIn:
    """The used part of auto_LiRPA's interface; it returns `answer(margins (1, R), eps)` and records calls."""

    answer: Answer = field(default=lambda margins_1R, eps: margins_1R - GAIN * eps)
    calls: list[tuple[float, Tensor]] = field(default_factory=list)
    norm: float = 2  # that is to be asked for

    def PerturbationLpNorm(self, *, norm: float, eps: float) -> SimpleNamespace:
        assert norm == self.norm
        return SimpleNamespace(eps=eps)

    def BoundedTensor(self, x: Tensor, ball: SimpleNamespace) -> SimpleNamespace:
        assert x.dtype == torch.float64
        return SimpleNamespace(x=x, eps=ball.eps)

    def BoundedModule(self, model: Any, x: Tensor, *, bound_opts: dict[str, Any], device: str) -> Any:
        model(x)  # it is traced here

        class Bounded:
            def __call__(_, z: Tensor) -> Tensor:
                return model(z)

            def nodes(_) -> list[Any]:
                return []

            def compute_bounds(_, *, x: Sequence[Any], C: Tensor, method: str, bound_upper: bool) -> Any:
                assert method == "CROWN"
                assert not bound_upper
                assert torch.get_default_dtype() == torch.float64
                self.calls.append((x[0].eps, C))
                return self.answer((C @ model(x[0].x)[0]).view(1, -1), x[0].eps), None

        return Bounded()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "auto_LiRPA", module)
    monkeypatch.setattr(door, "installed", lambda: True)
    return module


def test_absent_is_unknown_and_says_how_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(door, "installed", lambda: False)
    model = small_model("standard", 0)
    x, y = labelled(model, 3, 0)
    certificate = certify(model, x, y, eps=1e-6, method="crown")
    assert certificate.unknown_B.all()
    assert not certificate.certified_B.any()
    assert (certified_radius(model, x, y, method="crown") == 0).all()
    first = caplog.messages[0]
    assert "certizoo[crown]" in first
    assert "\n" not in first


def test_a_certifier_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(door, "installed", lambda: False)
    model = small_model("standard", 0)
    crown, (x, y) = Crown(model), labelled(model, 3, 0)
    for eps in (0.1, 0.2):
        crown.analyse(x, y).at(eps)
    assert len(caplog.messages) == 1


def test_bounds_of_margins_become_certificates(stand_in: StandIn) -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 4, 0)
    analysis = Crown(model).analyse(x, y)
    margin_B = analysis.clean.margin_BJ.amin(1)
    for share in (0.999, 1.001):
        certificate = analysis.at(share * margin_B / GAIN)
        assert (certificate.certified_B == (share < 1)).all()
        assert not certificate.unknown_B.any()
    identity = torch.eye(4, dtype=torch.float64)
    for i, (_, rows) in enumerate(stand_in.calls[:4]):
        rivals = [j for j in range(4) if j != y[i]]
        assert torch.equal(rows[0], identity[y[i]] - identity[rivals])
    wrong = Crown(model).analyse(x, (y + 1) % 4).at(1e-9)
    assert not (wrong.certified_B | wrong.correct_B).any()


def test_a_margin_within_the_tolerance_is_not_certified(stand_in: StandIn) -> None:
    stand_in.answer = lambda margins_1R, eps: torch.full_like(margins_1R, 0.5e-6)
    model = small_model("standard", 0)
    x, y = labelled(model, 2, 0)
    assert not certify(model, x, y, eps=0.1, method="crown").certified_B.any()


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf, torch.inf])
def test_an_overflow_is_unknown(stand_in: StandIn, bad: float) -> None:
    """An overflow for one rival makes the image unknown, whatever the other rivals give."""
    stand_in.answer = lambda margins_1R, eps: torch.cat([margins_1R[:, :-1], margins_1R[:, -1:] * 0 + bad], 1)
    model = small_model("standard", 0)
    x, y = labelled(model, 3, 0)
    certificate = certify(model, x, y, eps=1e-6, method="crown")
    assert certificate.unknown_B.all()
    assert not certificate.certified_B.any()


def test_a_failure_is_unknown_for_that_image(stand_in: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    def fail_on_the_second(margins_1R: Tensor, eps: float) -> Tensor:
        if len(stand_in.calls) == 2:
            raise AssertionError("lower\n>= 0")
        return margins_1R

    stand_in.answer = fail_on_the_second
    model = small_model("standard", 0)
    x, y = labelled(model, 3, 0)
    certificate = certify(model, x, y, eps=0.1, method="crown")
    assert certificate.unknown_B.tolist() == [False, True, False]
    assert certificate.certified_B.tolist() == [True, False, True]
    assert [m for m in caplog.messages if "failed" in m and "\n" not in m]


def test_a_model_that_cannot_be_traced_is_unknown(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("There are unsupported operations")

    model = small_model("standard", 0)
    x, y = labelled(model, 2, 0)
    monkeypatch.setattr(stand_in, "BoundedModule", refuse)
    assert certify(model, x, y, eps=1e-6, method="crown").unknown_B.all()
    assert "unsupported" in caplog.text
    monkeypatch.undo()


def test_a_trace_of_another_function_is_unknown(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = stand_in.BoundedModule
    monkeypatch.setattr(
        stand_in, "BoundedModule", lambda model, x, **options: honest(lambda z: model(z) * (1 + 1e-6), x, **options)
    )
    model = small_model("standard", 0)
    x, y = labelled(model, 2, 0)
    assert certify(model, x, y, eps=1e-6, method="crown").unknown_B.all()


def test_larger_and_smaller_balls_are_not_asked_for_again(stand_in: StandIn) -> None:
    model = small_model("standard", 0)
    x, y = labelled(model, 1, 0)
    analysis = Crown(model).analyse(x, y)
    limit = float(analysis.clean.margin_BJ.amin()) / GAIN
    assert analysis.at(limit / 2).certified_B.all()
    assert analysis.at(limit / 4).certified_B.all()
    assert analysis.at(0.0).certified_B.all()
    assert len(stand_in.calls) == 1
    assert not analysis.at(limit * 2).certified_B.any()
    assert len(stand_in.calls) == 2
    radius = certified_radius(model, x, y, method="crown")
    assert 0.99 * limit <= radius <= limit


def test_a_box_is_asked_for_as_one(stand_in: StandIn) -> None:
    model, stand_in.norm = small_model("standard", 0), float("inf")
    x, y = labelled(model, 1, 0)
    analysis = Crown(model, "linf").analyse(x, y)
    limit = float(analysis.clean.margin_BJ.amin()) / GAIN
    assert analysis.at(limit / 2).certified_B.all()
    assert [eps for eps, _ in stand_in.calls] == [limit / 2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("seed", [0, 1])
def test_rounding_is_bounded_layer_by_layer(stand_in: StandIn, seed: int) -> None:
    """A bound of the rounding of the whole net at once overflows on this net, and no image would be correct."""
    stand_in.norm = float("inf")
    model = vit.read(exported(published_vit(seed, depth=4)))
    x = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    y = model(x.double()).argmax(1)
    analysis = Crown(model, "linf").analyse(x, y)
    assert lowered(bake(model), x.double(), analysis.clean).margin_BJ.amin() == -torch.inf
    at_image = analysis.at(0.0)
    assert (at_image.certified_B & (at_image.loss_B < 1e-3 * at_image.margin_B)).all()
    assert analysis.at(0.9 * analysis.clean.margin_BJ.amin(1) / GAIN).certified_B.all()
    lost = decide(lowered(bake(model), x.double(), analysis.clean), torch.zeros(4, 4).double(), at_image.eps_B)
    assert (lost.correct_B & lost.unknown_B & ~lost.certified_B).all()


MODELS: dict[str, Callable[[], Any]] = {
    **{parts: partial(small_model, parts, 1) for parts in PARTS},
    **{name: partial(zoo.create_model, name, **THREE_HEADS) for name in ("l2_vit_ti", "scsa_vit_ti")},
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_traced_is_the_same_function(name: str) -> None:
    """Attention, norms and activations in elementary operations agree, also far from the clean image."""
    baked = bake(MODELS[name]())
    x = torch.rand(5, 1, 8, 8, dtype=torch.float64) * torch.tensor([1e-3, 0.5, 1.0, 5.0, 50.0]).view(-1, 1, 1, 1)
    with torch.no_grad(), Plain():
        rewritten = plain(baked)(x)
    torch.testing.assert_close(rewritten, baked(x), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("power", [lambda z: z**2, lambda z: z.pow(2), torch.square, lambda z: torch.pow(z, 2)])
def test_squares_are_traced_as_products(power: Callable[[Tensor], Tensor]) -> None:
    """Bounds of z**2 by auto_LiRPA 0.7.1 are wrong; those of z * z are right."""
    z = torch.tensor([1.0, -2.0])
    with Plain():
        graph = torch.jit.trace(power, (z,)).graph
        assert torch.equal(power(z), z * z)
    assert {node.kind() for node in graph.nodes()} == {"aten::mul"}


@pytest.mark.parametrize("power", [lambda z: z**4, lambda z: z.pow(3)])
def test_other_powers_are_refused(power: Callable[[Tensor], Tensor]) -> None:
    with Plain(), pytest.raises(NotImplementedError, match="even powers are wrong"):
        power(torch.ones(1))


class OneFunction(nn.Module):
    """Logits f(z) and 0 of an image's only pixel z."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        z = self.f(x.flatten(1) * torch.ones(1, 3, dtype=x.dtype)).mean(1, keepdim=True)
        return torch.cat([z, 0 * z], 1)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda z: z**2,
    "root": lambda z: (z**2 + 1).sqrt(),
    "quotient": lambda z: z / (z**2 + 1).sqrt(),
    "exponential": torch.exp,
    "softmax": lambda z: torch.softmax(z * z.new_tensor([1.0, -2.0, 0.5]), -1) * z.new_tensor([1.0, 0.2, -0.3]),
    "product": lambda z: z * torch.sigmoid(z),
    **{name: getattr(nn.functional, name) for name in ("relu", "gelu", "tanh", "sigmoid", "leaky_relu")},
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bounds_of_auto_lirpa_contain_the_values_of_a_function(name: str) -> None:
    pytest.importorskip("auto_LiRPA", reason=f"the real one is not installed: {door.INSTALL}")
    model = OneFunction(FUNCTIONS[name]).eval()
    lower = door.traced(model, torch.zeros(1, 1, 1, 1, dtype=torch.float64), "linf")
    for low, high in ((1.0, 2.0), (-2.0, -1.0), (-0.5, 1.0), (-1.0, 0.5), (-4.0, 4.0), (0.3, 0.31)):
        middle = torch.full((1, 1, 1, 1), (low + high) / 2, dtype=torch.float64)
        values = model(torch.linspace(low, high, 1001, dtype=torch.float64).view(-1, 1, 1, 1))[:, 0]
        for sign in (1.0, -1.0):
            bound = float(lower(middle, torch.tensor([[sign, 0.0]], dtype=torch.float64), (high - low) / 2))
            assert bound <= float((sign * values).min()) + door.TOLERANCE


@pytest.mark.parametrize("power", [lambda z: z.clone().pow_(2), lambda z: operator.ipow(z.clone(), 2)])
def test_powers_that_get_past_the_mode_are_refused(power: Callable[[Tensor], Tensor]) -> None:
    pytest.importorskip("auto_LiRPA", reason=f"the real one is not installed: {door.INSTALL}")
    with pytest.raises(NotImplementedError, match="even powers are wrong"):
        door.traced(OneFunction(power).eval(), torch.ones(1, 1, 1, 1, dtype=torch.float64), "linf")


@pytest.mark.parametrize("parts", ["smooth", "lofast", "standard"])
def test_auto_lirpa_itself_is_not_beaten(parts: str) -> None:
    pytest.importorskip("auto_LiRPA", reason=f"the real one is not installed: {door.INSTALL}")
    model = small_model(parts, 0)
    x, y = labelled(model, 2, 0)
    baked, analysis = bake(model), Crown(model).analyse(x, y)
    for eps in (0.02, 0.3):
        certificate = analysis.at(eps)
        assert not certificate.unknown_B.any()
        found_B = ascend(margin_loss(baked, y), x.double(), certificate.eps_B, steps=60, starts=3)
        assert (-found_B >= certificate.margin_B - certificate.loss_B).all()
    assert analysis.at(0.02).certified_B.any()
