"""Certificates by linear bounds: no ascent beats them, and on small nets they are those of a slow oracle."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.vnncomp import vit
from certify import certified_radius, certify
from certify.api import captured, certifier
from certify.linear.backward import Bounds, lowest
from certify.linear.capture import program_of
from certify.linear.linear import Linear, LinearAnalysis
from certify.linear.tuned import tuned
from certify.shared.bake import bake, model_of
from tests.tools.ascent import ascend, ascend_box, margin_loss
from tests.tools.cases import mostly_slow
from tests.tools.exported_vit import exported, published_vit
from tests.tools.small_models import small_model
from zoo.bounds.rule_table import NoRule

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
NORMS = {"l2": ascend, "linf": ascend_box}


def mlp(seed: int, depth: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten()]
    for wide in (64, *(12,) * (depth - 1)):
        layers += [nn.Linear(wide, 12), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(12, 4)).eval()


class ConvNet(nn.Module):
    """A residual convolution with batch norm, and what a captured graph moves around."""

    def __init__(self, seed: int, act: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem, self.norm, self.act = nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), act()
        self.conv, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(8, 4)
        nn.init.normal_(self.norm.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.stem(x)))
        x = x + self.act(self.conv(x)) * torch.sigmoid(x)
        y: Tensor = self.head(torch.cat([x.mean((2, 3)), x[:, :, 0, :2].sum(-1)], 1))
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(0),
    "conv": lambda: ConvNet(0, nn.ReLU).eval(),
    "conv, smooth": lambda: ConvNet(1, nn.SiLU).eval(),
    "vit": lambda: vit.read(exported(published_vit(0))),
    **{parts: partial(small_model, parts, 0) for parts in ("standard", "cls", "stem", "smooth")},
}


def batch(model: nn.Module, count: int, seed: int) -> tuple[Tensor, Tensor]:
    channels = next(w.shape[1] for w in (*model.parameters(), torch.zeros(1, 1, 1, 1)) if w.ndim == 4)
    x = torch.rand(count, channels, 8, 8, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return x, model(x.to(next(model.parameters()).dtype)).argmax(1)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", mostly_slow(MODELS, "conv", "vit"))
def test_no_ascent_beats_the_bound(name: str, norm: str) -> None:
    model = MODELS[name]()
    x, y = batch(model, 2, 0)
    exact, analysis = bake(model), certifier(model, "linear", None, norm, (x, y)).analyse(x, y)
    for eps in (0.3, 0.03) if norm == "l2" else (0.05, 0.004):
        found = analysis.at(eps)
        eps_B = torch.full((2,), eps, dtype=torch.float64)
        least_B = -NORMS[norm](margin_loss(exact, y), x.double(), eps_B, steps=20, starts=2)
        assert (least_B >= found.margin_B - found.loss_B - 1e-12).all()
        assert (~found.certified_B | (least_B > 0)).all()
    assert found.certified_B.any() or name == "smooth"


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", mostly_slow(MODELS, "mlp", "vit"))
def test_small_balls_cost_the_gradient(name: str, norm: str) -> None:
    """As eps -> 0, the loss over eps tends to the dual norm of a margin's gradient, for the class that binds."""
    model = MODELS[name]()
    x, y = batch(model, 1, 1)
    exact, eps = bake(model), 1e-6
    analysis = certifier(model, "linear", None, norm, (x, y)).analyse(x, y)
    found = analysis.at(eps)
    image = x.double().requires_grad_(True)
    logits = exact(image)[0]
    slopes = torch.stack([torch.autograd.grad(logits[y[0]] - logit, image, retain_graph=True)[0] for logit in logits])
    order = 2 if norm == "l2" else 1
    steep_J = torch.linalg.vector_norm(slopes.flatten(1), order, 1)
    rounding = float(analysis.at(0.0).loss_B)
    assert rounding < 1e-8
    share = (float(found.loss_B) - rounding) / eps / steep_J
    assert ((share - 1).abs() < 0.02).any()
    assert float(found.loss_B) >= float((steep_J[steep_J > 0].min()) * eps) * (1 - 1e-6)


def test_answers_do_not_depend_on_the_batch() -> None:
    model = vit.read(exported(published_vit(1)))
    x, y = batch(model, 6, 2)
    together = certify(model, x, y, 0.002 * torch.arange(6).double(), "linear", norm="linf")
    for i in (0, 3, 5):
        alone = certify(model, x[i : i + 1], y[i : i + 1], 0.002 * i, "linear", norm="linf")
        torch.testing.assert_close(alone.loss_B[0], together.loss_B[i], rtol=1e-9, atol=1e-12)


def slow_crown(model: nn.Sequential, x: Tensor, eps: float, order: float) -> Tensor:
    """Return CROWN's lower bounds of all logits' margins over logit 0, layer by layer with dense matrices."""
    layers = [m for m in model if isinstance(m, nn.Linear)]
    boxes: list[tuple[Tensor, Tensor]] = []

    def lower(rows: Tensor, upto: int) -> Tensor:
        const = torch.zeros(len(rows)).double()
        for k in range(upto, -1, -1):
            const, rows = const + rows @ layers[k].bias, rows @ layers[k].weight
            if k == 0:
                return const + rows @ x - eps * torch.linalg.vector_norm(rows, order, 1)
            low, high = boxes[k - 1]
            cross = (low < 0) & (high > 0)
            steep = torch.where(cross, high / (high - low), (low >= 0).double())
            flat = torch.where(cross, (high >= -low).double(), steep)
            const = const + rows.clamp(max=0) @ torch.where(cross, -steep * low, 0.0)
            rows = rows.clamp(min=0) * flat + rows.clamp(max=0) * steep
        raise AssertionError

    for k, layer in enumerate(layers[:-1]):
        eye = torch.eye(len(layer.weight)).double()
        low, high = lower(eye, k), -lower(-eye, k)
        if k:
            below, above = (end.clamp(min=0) for end in boxes[-1])
            middle, spread = (below + above) / 2 @ layer.weight.mT + layer.bias, (above - below) / 2
            low = torch.maximum(low, middle - spread @ layer.weight.abs().mT)
            high = torch.minimum(high, middle + spread @ layer.weight.abs().mT)
        boxes.append((low, high))
    classes = torch.eye(4).double()
    return lower(classes[:1] - classes, len(layers) - 1)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("seed", mostly_slow(range(3), 0))
def test_a_mlp_has_the_bounds_of_a_dense_oracle(seed: int, norm: str) -> None:
    model: Any = mlp(seed, depth=4).double()
    x = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(seed)).double()
    with torch.no_grad():
        model[-1].bias[0] += 5  # the label is 0
    y = torch.zeros(1, dtype=torch.long)
    analysis = certifier(model, "linear", None, norm, (x, y)).analyse(x, y)
    assert isinstance(analysis, LinearAnalysis)
    for eps in (0.001, 0.02, 0.1):
        with torch.no_grad():
            expected = slow_crown(model, x.flatten(), eps, 2 if norm == "l2" else 1)
            eps_B = torch.full((1,), eps, dtype=torch.float64)
            bounds = Bounds.on_balls(analysis._program, x.unsqueeze(1), eps_B, analysis.ball)
            classes = torch.eye(4, dtype=torch.float64)
            rows = (classes[:1] - classes)[None, 1:]
            bound_R = lowest(bounds, rows)[0]
            torch.testing.assert_close(bound_R, expected[1:], rtol=1e-9, atol=1e-9)
            assert (tuned(bounds, rows)[0] >= bound_R - 1e-9).all()


@pytest.mark.slow
def test_offsets_that_cancel_are_rounding() -> None:
    """A bias that a later layer takes back costs digits, and the loss says so."""
    losses = []
    for offset in (0.0, 2.0**20, 2.0**36, 2.0**50):
        model: Any = mlp(0).double()
        x, y = batch(model, 1, 0)
        with torch.no_grad():
            model[1].bias[0] += offset
            model[3].bias -= offset * model[3].weight[:, 0]
            y = model(x.double()).argmax(1)
        losses.append(float(certify(model, x, y, 0.0, "linear").loss_B))
    assert losses[0] < 1e-12 < losses[1] / 100 < losses[2] / 1e4 < losses[3] / 1e6


def test_radii_lie_between_a_proof_and_an_attack() -> None:
    model = mlp(1)
    x, y = batch(model, 4, 3)
    radius = certified_radius(model, x, y, method="linear", norm="linf")
    assert (radius > 0).all()
    assert certify(model, x, y, radius, "linear", norm="linf").certified_B.all()


def test_an_operation_without_bounds_is_refused() -> None:
    model = small_model("lofast", 0)
    x, y = batch(model, 1, 0)
    with pytest.raises(NoRule, match=r"linear bounds: linalg_vector_norm has none"):
        Linear(model).analyse(x, y)


@pytest.mark.parametrize("act", [nn.CELU, nn.SELU, nn.Softplus, nn.PReLU])
def test_an_activation_without_lines_is_refused(act: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), act(), nn.Linear(4, 3)).eval()
    x, y = batch(model, 1, 0)
    with pytest.raises(NoRule, match="linear bounds: "):
        certify(model, x, y, 0.1, "linear")


def test_a_box_without_a_finite_bound_is_unknown() -> None:
    model = small_model("standard", 2)
    x, y = batch(model, 2, 0)
    found = certify(model, x, y, 1e3, "linear")
    assert not found.certified_B.any()
    assert found.correct_B.all()


def test_lengths_of_affine_results_are_those_of_dense_rows() -> None:
    """Convolutions, normalisation and moves before the first curve; nothing behind it."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    first = nn.Sequential(nn.Conv2d(1, 3, 3, 2, 1), norm, nn.Flatten(), nn.Linear(48, 5)).double().eval()
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(5, 4)).double().eval()
    program = program_of(model_of(captured(model, (1, 8, 8))).exact, (1, 8, 8))
    exact = torch.autograd.functional.jacobian(first, torch.rand(1, 1, 8, 8).double()).flatten(2)[0].norm(dim=-1)
    found = [program.lengths(k + 1) for k, step in enumerate(program.steps) if tuple(step.shape) == (1, 5)]
    assert [lengths is None for lengths in found] == [False, True]
    assert found[0] is not None
    torch.testing.assert_close(found[0].flatten(), exact, rtol=1e-8, atol=0)
    assert (found[0].flatten() >= exact).all()
