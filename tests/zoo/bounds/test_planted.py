"""A constant of a rule that is 5 % too small is detected.

For each constant the test has a construction where it is tight: 0.95 bound < largest found <= bound, so 0.95 times the
bound would be refuted. Some faults are planted, to verify this.

Other tests cover E1 and E2 to 1e-10, sqrt(6)/9, tau and the levels of the scores (test_curvature.py of attention); the
range of sigma'' by dense sampling, printed extrema to 2e-10, eigenvalues to 1 % (test_curvature.py); sigma_upper
(test_spectral.py); served types (test_rounding.py); whole certificates by 100,000 attacks (test_trials_slow.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from certify import certified_radius
from certify.shared.bake import bake
from tests.tools.ascent import ascend, largest_change, margin_loss
from tests.tools.expansions import Instance, largest_dip
from tests.tools.small_models import AVG, SMALL, labelled
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.theory.softmax_row import K2_MAX
from zoo.bounds import rule_table, torch_modules
from zoo.bounds.contracts import Bound, Layer
from zoo.bounds.first_order import classifier_of, layer_of, residual_layer_of, steps_of
from zoo.layers import norms
from zoo.layers.mlp import SLL, Mlp
from zoo.layers.norms import CenterNorm, LayerProject, SmoothProject
from zoo.layers.patches import Normalize
from zoo.layers.residual import WeightedResidual

D = 6


def token(*values: float) -> Tensor:
    """Return one image of one token (1, 1, D) that begins with these values."""
    x = torch.zeros(1, 1, D).double()
    x[0, 0, : len(values)] = torch.tensor(values)
    return x


def weighted(module: Any, **values: Any) -> Any:
    """Return the module with some parameters filled or replaced; dotted names use `__`."""
    module = module.double().requires_grad_(False)
    for name, value in values.items():
        parameter = module.get_parameter(name.replace("__", "."))
        parameter.copy_(torch.as_tensor(value, dtype=torch.float64).expand_as(parameter))
    return module


@dataclass(frozen=True)
class Tight:
    """A module, an input and a radius at which its rule is tight; `residual` takes x + module(x)."""

    module: nn.Module
    x: Tensor
    r: float
    residual: bool = False

    def share(self) -> float:
        """Return (largest change found) / bound."""
        layer = (residual_layer_of if self.residual else layer_of)(self.module)
        r_B = torch.tensor([self.r]).double()
        with torch.no_grad():
            bound_B = layer(self.x)[1](r_B)
        f = (lambda z: z + self.module(z)) if self.residual else self.module
        return float(largest_change(f, self.x, r_B, steps=120, starts=5) / bound_B)


def linear_attention() -> nn.Module:
    """Return attention in which two tokens always attend to each other equally."""
    torch.manual_seed(0)
    weight = torch.cat([torch.zeros(2 * D, D), torch.randn(D, D)])
    return weighted(DotProductAttention(D, 2), qkv__weight=weight)


def matched_mlp() -> nn.Module:
    """Return an MLP whose fc2 picks up the direction that fc1 stretches most, through units at their largest slope."""
    u, v = torch.eye(D)[0], torch.eye(2 * D)[1]
    return weighted(
        Mlp(D, 2 * D),
        fc1__weight=2 * torch.outer(v, u),
        fc1__bias=2**0.5,
        fc2__weight=3 * torch.outer(u, v),
        fc2__bias=0,
    )


FIRST: dict[str, Callable[[], Tight]] = {
    "identity: 1": lambda: Tight(nn.Identity(), token(1.0), 0.1),
    "residual: 1": lambda: Tight(
        weighted(nn.Linear(D, D), weight=torch.eye(D), bias=0), token(1.0), 0.1, residual=True
    ),
    "linear: ||W||": lambda: Tight(weighted(nn.Linear(D, D), weight=torch.randn(D, D)), token(1.0), 0.1),
    "ReLU: slope 1": lambda: Tight(nn.ReLU(), token(*[1.0] * D), 0.1),
    "tanh: slope 1": lambda: Tight(nn.Tanh(), token(), 0.01),
    "GELU: 1.1289041452": lambda: Tight(nn.GELU(), token(*[2**0.5] * D), 0.01),
    "tanh-GELU: 1.1289930688": lambda: Tight(nn.GELU("tanh"), token(*[2**0.5] * D), 0.01),
    "MLP: slope and both norms": lambda: Tight(matched_mlp(), token(), 1e-3),
    "SLL: 1": lambda: Tight(weighted(SLL(D, D), weight=torch.eye(D), bias=-1.0), token(), 0.1),
    "LayerProject: 1 inside": lambda: Tight(LayerProject(D, 2.0), token(1.0), 0.1),
    "LayerProject: chord outside": lambda: Tight(LayerProject(D, 2.0), token(4.0), 1.5),
    "SmoothProject: chord": lambda: Tight(SmoothProject(D, 2.0), token(), 0.1),
    "LayerNorm: gamma / sigma": lambda: Tight(
        weighted(nn.LayerNorm(D, eps=1.0), weight=2.0), token(*[0.3, -0.3, 0.1, -0.1, 0.0, 0.0]), 0.01
    ),
    "CenterNorm: d / (d - 1)": lambda: Tight(weighted(CenterNorm(D)), token(1.0), 0.1),
    "weighted residual": lambda: Tight(weighted(WeightedResidual(D, init=0.5)), token(1.0), 0.1),
    "attention: zeta": lambda: Tight(linear_attention(), torch.randn(1, 2, D).double(), 0.1),
    "attention: zeta of the sum": lambda: Tight(linear_attention(), torch.randn(1, 2, D).double(), 0.1, residual=True),
    "Normalize: 1 / std": lambda: Tight(Normalize((0.5,), (0.25,)).double(), torch.rand(1, 1, 3, 3).double(), 0.1),
    "Conv2d: 1 x 1": lambda: Tight(
        weighted(nn.Conv2d(2, 3, 1), weight=torch.randn(3, 2, 1, 1)), torch.rand(1, 2, 3, 3).double(), 0.1
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_a_first_order_constant_is_tight_somewhere(name: str) -> None:
    torch.manual_seed(1)
    assert 0.955 < FIRST[name]().share() <= 1 + 1e-9


@pytest.mark.parametrize("pool", ["avg", "cls"])
def test_the_embedding_and_the_pooling_of_a_model_are_tight(pool: str) -> None:
    """The factors are the patch norm with the std of the pixels, 1 / sqrt(N) of the mean, and 1 of the class token."""
    torch.manual_seed(0)
    options = SMALL | AVG | {"global_pool": pool, "std": [0.3], "depth": 1}
    model: Any = bake(zoo.create_model("dp_vit_ti", **options))
    steps, images = steps_of(classifier_of(model)[0]), torch.rand(1, 1, 8, 8).double()
    (_, bound), tokens = steps[0](images), model.embed(images)
    r_B = torch.tensor([0.1]).double()
    pooled = next(step for step in steps if getattr(step, "parts", None) == ("pool",))
    for f, x, limit in ((model.embed, images, bound), (model.pool, tokens, pooled(tokens)[1])):
        assert 0.955 < float(largest_change(f, x, r_B, steps=120, starts=3) / limit(r_B)) <= 1 + 1e-9


def linear_model() -> Any:
    """Return a model without blocks and with an affine norm, for which the certificate can be exact."""
    torch.manual_seed(0)
    return zoo.create_model("dp_vit_ti", **(SMALL | AVG | {"depth": 0, "norm": "centernorm"})).eval()


def test_the_certificate_of_a_linear_model_is_exact() -> None:
    """The radius min_j m_j / ||grad m_j|| is exact, and so is each factor: std, patches, norm, pooling, classes."""
    model = linear_model()
    x, y = labelled(model, 8, 0)
    baked, z = bake(model), x.double().requires_grad_()
    logits = baked(z)
    exact = []
    for j in range(4):
        margin_B = logits.gather(1, y[:, None])[:, 0] - logits[:, j]
        (g,) = torch.autograd.grad(margin_B.sum(), z, retain_graph=True)
        exact.append(torch.where(y == j, torch.inf, margin_B.detach() / g.flatten(1).norm(dim=1)))
    share_B = certified_radius(model, x, y, method="adjoint") / torch.stack(exact).amin(0)
    assert (share_B <= 1).all()
    assert (share_B > 0.99).all()


# second order ---------------------------------------------------------------------------------------------------------


def remainder_share(module: nn.Module, x: Tensor, g: Tensor, r: float) -> float:
    """Return (largest -<g, R> found) / bound, over the gradients g (C, 1, 1, D)."""
    case = Instance(module, x, g, torch.tensor([r]).double())
    return float((largest_dip(case, steps=120, starts=4) / case.expansion().remainder(g)(case.r_B[None])).max())


def unit(i: int, sign: float = 1.0) -> Tensor:
    return sign * torch.eye(D).double()[i].view(1, 1, 1, D)


def fan() -> Tensor:
    """Return gradients between the first two axes."""
    angles = torch.linspace(0, 2 * math.pi, 73).double()
    g = torch.zeros(73, 1, 1, D).double()
    g[:, 0, 0, 0], g[:, 0, 0, 1] = angles.cos(), angles.sin()
    return g


def one_unit(act: type[nn.Module], at: float, sign: float) -> tuple[nn.Module, Tensor, Tensor, float]:
    """Return an SLL layer of one unit, where 2 T^{-1} W^T g weighs sigma''."""
    layer = weighted(SLL(D, 1, act), weight=torch.eye(D)[:, :1], bias=at)
    return layer, token(), unit(0, sign), 1e-3


SECOND: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor, float]]] = {
    "norm: 0.42932510 at R / 2": lambda: (SmoothProject(D, 1.0), token(0.5), fan(), 1e-3),
    "norm: R / sqrt3 x^2 beyond": lambda: (SmoothProject(D, 1.0), token(2.0), fan(), 1e-3),
    "LayerNorm: gamma sqrt(d) / R": lambda: (
        weighted(nn.LayerNorm(D, eps=1.0), weight=2.0),
        token(3.0, -3.0, 1.0, -1.0),
        torch.randn(300, 1, 1, D).double(),
        1e-3,
    ),
    "LayerProject: outside": lambda: (LayerProject(D, 1.0), token(2.0), fan(), 1e-3),
    "GELU: 0.7978845609 at 0": lambda: (nn.GELU(), token(), unit(0, -1), 1e-3),
    "GELU: -0.1079819331 at 2": lambda: (nn.GELU(), token(2.0), unit(0), 1e-3),
    "tanh-GELU: 0.7978845609 at 0": lambda: (nn.GELU("tanh"), token(), unit(0, -1), 1e-3),
    "tanh-GELU: -0.1079135159": lambda: (nn.GELU("tanh"), token(2.0134807), unit(0), 1e-3),
    "tanh: 0.7698003590": lambda: (nn.Tanh(), token(-0.6584789), unit(0, -1), 1e-3),
    "tanh: -0.7698003590": lambda: (nn.Tanh(), token(0.6584789), unit(0), 1e-3),
    "SLL: 2 / T": lambda: one_unit(nn.Tanh, 0.6584789, -1),
    "ReLU: the kink": lambda: (nn.ReLU(), token(1e-9), unit(0, -1), 0.1),
    "MLP: half the Hessian": lambda: (
        weighted(Mlp(D, D), fc1__weight=2 * torch.eye(D), fc1__bias=0, fc2__weight=torch.eye(D), fc2__bias=0),
        token(),
        unit(0, -1),
        1e-3,
    ),
}


@pytest.mark.parametrize("name", SECOND)
def test_a_second_order_constant_is_tight_somewhere(name: str) -> None:
    torch.manual_seed(1)
    assert 0.955 < remainder_share(*SECOND[name]()) <= 1 + 1e-6


def test_softmax_dispersion_by_two_points() -> None:
    """Both constants are attained.

    Var <= range^2 / 4 gives the slope 1/2, |third moment| <= range^3 / (6 sqrt3) gives sqrt(6) / 9.
    """
    best_slope, best_third = 0.0, 0.0
    v = torch.tensor([0.5**0.5, -(0.5**0.5)]).double()
    for p in torch.linspace(0.01, 0.99, 981).double():
        q = torch.stack([p, 1 - p])
        centred = v - (q * v).sum()
        best_slope = max(best_slope, float((q * centred.square()).sum()))
        best_third = max(best_third, float((q * centred**3).sum()))
    assert 0.5 * 0.95 < best_slope <= 0.5
    assert K2_MAX * 0.95 < best_third <= K2_MAX


# planted --------------------------------------------------------------------------------------------------------------


def _said(patch: pytest.MonkeyPatch, kind: type[nn.Module], **lies: Any) -> None:
    """Replace some rules of a type."""
    patch.setitem(rule_table._TABLE, kind, replace(rule_table._TABLE[kind], **lies))


def _smaller(act: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        honest = getattr(torch_modules, act)
        short = replace(
            honest,
            extrema=tuple((at, 0.95 * value) for at, value in honest.extrema),
            second=lambda z: 0.95 * honest.second(z),
        )
        kind = {"GELU": nn.GELU, "TANH": nn.Tanh}[act]
        _said(patch, kind, activation=lambda module: short)

    return plant


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "GELU: 1.1289041452": lambda patch: _said(
        patch, nn.GELU, activation=lambda module: replace(torch_modules.GELU, slopes=(0.0, 0.95 * 1.1289041452))
    ),
    "LayerNorm: gamma / sigma": lambda patch: _scaled(patch, nn.LayerNorm),
    "linear: ||W||": lambda patch: patch.setattr(
        torch_modules, "sigma_upper", lambda w: 0.95 * torch.linalg.matrix_norm(w, 2)
    ),
    "CenterNorm: d / (d - 1)": lambda patch: patch.setattr(
        norms, "sigma_upper", lambda w: 0.95 * torch.linalg.matrix_norm(w, 2)
    ),
    "SLL: 1": lambda patch: _scaled(patch, SLL),
    "attention: zeta": lambda patch: _scaled(patch, DotProductAttention),
}


def _scaled(patch: pytest.MonkeyPatch, kind: type[nn.Module]) -> None:
    honest = rule_table._TABLE[kind].rule
    assert honest is not None

    def short(module: nn.Module) -> Layer:
        layer = honest(module)

        def shorter(x: Tensor) -> tuple[Tensor, Bound]:
            y, bound = layer(x)
            return y, lambda r: 0.95 * bound(r)

        return shorter

    _said(patch, kind, rule=short)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_of_first_order_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    PLANTED[name](monkeypatch)
    assert FIRST[name]().share() > 1


@pytest.mark.parametrize(
    ("act", "name"), [("GELU", "GELU: 0.7978845609 at 0"), ("TANH", "tanh: 0.7698003590"), ("TANH", "SLL: 2 / T")]
)
def test_a_planted_fault_of_second_order_is_caught(act: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    _smaller(act)(monkeypatch)
    assert remainder_share(*SECOND[name]()) > 1


@pytest.mark.parametrize("method", ["lofast", "adjoint"])
def test_a_planted_pair_of_classes_is_caught(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted ||w_y - w_j|| is 5 % too small.

    The head's pair of classes reads the direction that the trunk amplifies.
    """
    import certify.adjoint.adjoint
    import certify.methods.lofast
    from certify.shared.certificate import pair_weights

    for module in (certify.adjoint.adjoint, certify.methods.lofast):
        monkeypatch.setattr(module, "pair_weights", lambda head, labels: 0.9 * pair_weights(head, labels))
    model = linear_model()
    with torch.no_grad():  # the trunk keeps one direction of the patches, which the head reads
        nn.init.zeros_(model.patch_embed.proj.weight)
        model.patch_embed.proj.weight[0] = 0.25
        model.patch_embed.proj.weight[1] = -0.25
        model.norm.weight.fill_(1)
        model.head.weight.zero_()
        model.head.weight[:, 0], model.head.weight[:, 1] = torch.arange(4.0), -torch.arange(4.0)
    x, y = labelled(model, 8, 0)
    radius_B = certified_radius(model, x, y, method=method)
    found_B = ascend(margin_loss(bake(model), y), x.double(), radius_B, steps=80, starts=3)
    assert (found_B[radius_B > 0] > 0).any()
