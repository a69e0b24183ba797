"""Gradient ascent attacks every Lipschitz claim on random and trained weights; every false claim is refuted."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from certify import certified_radius
from certify.shared.bake import bake, logit_differences
from certizoo import UserError
from tests.tools.ascent import ascend, largest_change
from tests.tools.cases import mostly_slow
from tests.tools.first_order_cases import instances, scaled_
from zoo.attention.dot_product import DotProductAttention
from zoo.bounds.first_order import layer_of
from zoo.layers.block import PostNormBlock
from zoo.layers.constrained import CONSTRAINTS, constrain_
from zoo.layers.init import spectral_init_
from zoo.layers.mlp import SLL, ConstrainedMlp, Mlp
from zoo.layers.norms import CenterNorm, LayerProject, SmoothProject
from zoo.layers.residual import WeightedResidual
from zoo.models.factory import MLPS
from zoo.spectral import sigma_upper

N, D = 5, 12
CENTER = D / (D - 1)
SMALL: dict[str, Any] = {"img_size": 8, "patch_size": 4, "embed_dim": D, "depth": 2, "num_heads": 3, "num_classes": 4}


def constrained(kind: str, scale: float) -> nn.Module:
    """Return a matrix under a constraint, wide or tall, far from its start."""
    linear = nn.Linear(D, 2 * D if scale < 1 else 7)
    constrain_(linear, kind)
    return scaled_(linear, scale)


def constrained_mlp(kind: str, act: type[nn.Module], scale: float) -> nn.Module:
    mlp = ConstrainedMlp(D, 2 * D, kind, act)
    mlp.finish_init()
    return scaled_(mlp, scale)


def spectral(module: nn.Module) -> nn.Module:
    spectral_init_(module)
    return module


# claim: (how to make the module, claimed Lipschitz constant, share of it that the search must reach)
CLAIMS: dict[str, tuple[Callable[[float], nn.Module], float, float]] = {
    "LayerProject": (lambda s: LayerProject(D, s * D**0.5), 1, 0.99),
    "SmoothProject": (lambda s: SmoothProject(D, s * D**0.5), 1, 0.99),
    "CenterNorm": (lambda s: CenterNorm(D), CENTER, 0.99),
    "SLL relu": (lambda s: scaled_(SLL(D, 2 * D), s), 1, 0.99),
    "SLL tanh": (lambda s: scaled_(SLL(D, 2 * D, nn.Tanh), s), 1, 0.99),
    "AOL": (partial(constrained, "aol"), 1, 0.8),
    "orthogonal": (partial(constrained, "orthogonal"), 1, 0.99),
    "AOL MLP": (partial(constrained_mlp, "aol", nn.ReLU), 1, 0.6),
    "orthogonal MLP": (partial(constrained_mlp, "orthogonal", nn.Tanh), 1, 0.8),
    "spectral init": (lambda s: spectral(nn.Linear(D, int(8 * s + 1))), 1, 0.99),
}


def largest_ratio(module: nn.Module, x: Tensor, r_B: Tensor) -> float:
    return float((largest_change(module, x, r_B) / r_B).max())


@pytest.mark.parametrize("claim", mostly_slow(CLAIMS, *list(CLAIMS)[::2]))
def test_no_ascent_beats_a_claim_on_random_weights(claim: str) -> None:
    make, constant, teeth = CLAIMS[claim]
    worst = max(largest_ratio(*case) for case in instances(make, (N, D), seed=0))
    assert worst <= constant * (1 + 1e-9)
    assert worst >= constant * teeth, "the search is too weak"


def examples() -> tuple[Tensor, Tensor]:
    """Return four classes of images, one pattern each, with noise."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(64) % 4
    patterns = torch.rand(4, 3, 8, 8, generator=generator)
    return (0.6 * patterns[y] + 0.4 * torch.rand(64, 3, 8, 8, generator=generator)), y


def trained(name: str, **options: Any) -> Any:
    """Train for 40 steps of Adam, until weights have left their start and the loss has fallen."""
    torch.manual_seed(0)
    model = zoo.create_model(name, **(SMALL | options)).train()
    x, y = examples()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(40):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    return model.eval()


LIPS: dict[str, Any] = {"norm": "centernorm", "block": "postnorm", "residual": "weighted", "init": "spectral"}
TRAINED: list[tuple[str, dict[str, Any], tuple[type[nn.Module], ...]]] = [
    ("lofast_vit_c10", {}, (LayerProject, SLL)),
    ("lofast_vit_c10_smooth", {}, (SmoothProject, SLL)),
    ("lofast_vit_c10_aol", {}, (ConstrainedMlp,)),
    ("lofast_vit_c10_orthogonal", {}, (ConstrainedMlp,)),
    ("dp_vit_ti", LIPS, (WeightedResidual,)),
]


@pytest.mark.parametrize(("name", "options", "kinds"), TRAINED, ids=[name for name, _, _ in TRAINED])
def test_no_ascent_beats_a_claim_on_trained_weights(
    name: str, options: dict[str, Any], kinds: tuple[type[nn.Module], ...]
) -> None:
    """Folded float32 weights may exceed a constraint only by their rounding."""
    baked = bake(trained(name, **options))
    parts = [module for module in baked.modules() if type(module) in kinds]
    assert {type(part) for part in parts} == set(kinds)
    x = torch.randn(20, N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for part in parts:
        for scale in (0.1, 1.0, 10.0):
            assert largest_ratio(part, scale * x, 0.3 * scale * torch.ones(20).double()) <= 1 + 1e-6


def test_trained_centernorm_keeps_its_exact_constant() -> None:
    baked = bake(trained("dp_vit_ti", **LIPS))
    norms = [module for module in baked.modules() if isinstance(module, CenterNorm)]
    x, r = torch.zeros(4, 1, D, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    for norm in norms:
        assert not bool((norm.weight == 1).all())
        _, bound = layer_of(norm)(x)
        exact = torch.linalg.matrix_norm(torch.func.jacrev(norm)(x[0, 0]), 2)
        torch.testing.assert_close(bound(r)[0], exact, rtol=1e-8, atol=0)
        assert largest_ratio(norm, x, r) <= float(bound(r)[0]) * (1 + 1e-9)


# constraints ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize(
    "make",
    [lambda: nn.Linear(6, 17), lambda: nn.Linear(17, 6), lambda: nn.Conv2d(3, 8, 4, 4)],
    ids=["tall", "wide", "conv"],
)
def test_constraints_start_at_norm_one_and_keep_the_shape(kind: str, make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    module = make()
    shape = module.weight.shape
    constrain_(module, kind)
    assert module.weight.shape == shape
    sigma = torch.linalg.svdvals(module.weight.detach().double().flatten(1))
    assert float(sigma.max()) <= 1 + 1e-6
    assert float(sigma.min()) >= 1 - 1e-6  # orthogonal: every singular value
    module.weight.square().sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in module.parameters() if p.grad is not None)


def test_aol_by_its_equation_and_with_dead_columns() -> None:
    torch.manual_seed(0)
    linear: Any = nn.Linear(4, 6).double()
    constrain_(linear, "aol")
    w = torch.randn(6, 4, dtype=torch.float64)
    w[:, 2] = 0
    linear.parametrizations.weight.original.data.copy_(w)
    expected = torch.zeros_like(w)
    for i in (0, 1, 3):
        expected[:, i] = w[:, i] / sum(abs(float(w[:, i] @ w[:, j])) for j in range(4)) ** 0.5
    torch.testing.assert_close(linear.weight, expected)


def test_the_constraint_of_a_patch_embedding_is_its_exact_norm() -> None:
    """As a map of whole images the embedding has the norm of its (out, rest) matrix."""
    model: Any = zoo.create_model("lofast_vit_c10_orthogonal", **SMALL).double().eval()
    conv = model.patch_embed.proj
    pixels = torch.eye(3 * 8 * 8, dtype=torch.float64).view(-1, 3, 8, 8)
    dense = (conv(pixels) - conv(torch.zeros_like(pixels))).flatten(1)
    torch.testing.assert_close(
        torch.linalg.matrix_norm(dense, 2), torch.linalg.matrix_norm(conv.weight.flatten(1), 2), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("name", ["lofast_vit_c10_aol", "lofast_vit_c10_orthogonal"])
def test_constrained_models_certify_and_bake_to_the_same_function(name: str) -> None:
    model = trained(name)
    x, y = examples()
    assert logit_differences(model, bake(model), x).max() < 1e-5
    for weight in (model.patch_embed.proj.weight, model.blocks[0].mlp.fc1.weight, model.blocks[1].mlp.fc2.weight):
        assert float(sigma_upper(weight.flatten(1))) <= 1 + 1e-6
    radius_B = certified_radius(model, x, y, "lofast")
    assert int((radius_B > 1e-3).sum()) > len(y) // 2
    label = y[:, None]

    def loss(z: Tensor) -> Tensor:
        logits, own = bake(model)(z), label.repeat(len(z) // len(y), 1)
        return logits.scatter(1, own, -torch.inf).amax(1) - logits.gather(1, own).squeeze(1)

    assert (ascend(loss, x.double(), radius_B, steps=30, starts=2) <= 0)[radius_B > 0].all()


@pytest.mark.parametrize("mlp", sorted(MLPS))
def test_every_mlp_fits_into_a_model_and_has_a_proof(mlp: str) -> None:
    torch.manual_seed(0)
    model: Any = zoo.create_model("lofast_vit_c10", **SMALL, mlp=mlp).eval()
    x, _ = examples()
    assert bool((certified_radius(model, x, model(x).argmax(-1), "lofast") > 0).any())
    if type(model.blocks[0].mlp) is not Mlp:  # the others include their residual and are 1-Lipschitz
        _, bound = layer_of(bake(model).get_submodule("blocks.0.mlp"))(torch.zeros(1, N, D, dtype=torch.float64))
        assert float(bound(torch.ones(1, dtype=torch.float64))) <= 1 + 1e-6


def test_constrained_weights_survive_the_state_dict(tmp_path: Path) -> None:
    model = trained("lofast_vit_c10_orthogonal")
    zoo.handover.save(tmp_path, model, {"name": "lofast_vit_c10_orthogonal", **SMALL}, {})
    again, _ = zoo.handover.load(tmp_path)
    x, _ = examples()
    assert torch.equal(again(x), model(x))


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="no constraint 'aoll'"):
        constrain_(nn.Linear(2, 2), "aoll")
    with pytest.raises(UserError, match="patch_cap and patch_constraint"):
        zoo.create_model("lofast_vit_c10", **SMALL, patch_constraint="aol")
    with pytest.raises(UserError, match="residual init 2"):
        WeightedResidual(3, init=2.0)
    with pytest.raises(UserError, match="2 channels"):
        CenterNorm(1)


# LipsFormer's parts --------------------------------------------------------------------------------------------------


def weights_of(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            yield module.weight.detach().flatten(1)


def test_spectral_initialisation_is_one_for_every_stored_weight() -> None:
    """A float64 SVD of the float32 weights, W_Q, W_K, W_V as one matrix, exceeds 1 in none of 20 models."""
    for seed in range(20):
        torch.manual_seed(seed)
        model = zoo.create_model("dp_vit_ti", **SMALL, init="spectral")
        for weight in weights_of(model):
            assert 1 - 1e-5 < float(torch.linalg.matrix_norm(weight.double(), 2)) <= 1
        assert all(not bool(m.bias.any()) for m in model.modules() if isinstance(m, nn.Linear))


def test_xavier_alone_exceeds_one() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(D, D)
    nn.init.xavier_normal_(linear.weight)
    x, r = torch.randn(20, 1, D, dtype=torch.float64), torch.ones(20, dtype=torch.float64)
    assert largest_ratio(linear.double().requires_grad_(False), x, r) > 1.3


def test_centernorm_by_its_equation_and_it_is_not_one_lipschitz() -> None:
    """Its constant with gamma = 1 is D / (D - 1), which the ascent finds."""
    torch.manual_seed(0)
    norm = scaled_(CenterNorm(D), 1.0)
    x = torch.randn(3, D)
    weight, bias = norm.get_parameter("weight"), norm.get_parameter("bias")
    for i in range(3):
        mean = sum(x[i]) / D
        expected = torch.stack([weight[j] * D / (D - 1) * (x[i, j] - mean) + bias[j] for j in range(D)])
        torch.testing.assert_close(norm(x)[i], expected)
    plain = CenterNorm(D).double().requires_grad_(False)
    found = largest_ratio(plain, torch.randn(20, 1, D, dtype=torch.float64), torch.ones(20, dtype=torch.float64))
    assert found == pytest.approx(CENTER, rel=1e-6)
    assert found > 1.09


def test_layernorm_grows_as_its_eps_falls() -> None:
    """The ratio is 1 / sqrt(eps) at constant tokens, so no constant holds for all eps."""
    x, r = torch.ones(4, 1, D, dtype=torch.float64), torch.full((4,), 1e-6, dtype=torch.float64)
    found = [largest_ratio(nn.LayerNorm(D, eps=eps).double().requires_grad_(False), x, r) for eps in (1e-2, 1e-4, 1e-6)]
    assert found == pytest.approx([10, 100, 1000], rel=1e-3)


def test_sll_and_the_constrained_mlp_with_gelu_exceed_one() -> None:
    torch.manual_seed(0)
    r = torch.full((20,), 0.05, dtype=torch.float64)
    found = []
    for _ in range(20):
        layer = scaled_(SLL(D, 4 * D, nn.GELU), 3.0).double().requires_grad_(False)
        found.append(largest_ratio(layer, torch.randn(20, 1, D, dtype=torch.float64), r))
    assert max(found) > 1.001
    mlp = ConstrainedMlp(1, 1, "aol", nn.GELU).double().requires_grad_(False)
    for parameter, value in ((mlp.fc1.weight, 1), (mlp.fc2.weight, 1), (mlp.fc1.bias, 2**0.5)):
        parameter.fill_(value)
    x = torch.zeros(20, 1, 1, dtype=torch.float64)
    assert largest_ratio(mlp, x, r) > 1.06
    _, bound = layer_of(mlp)(x)
    assert largest_ratio(mlp, x, r) <= float((bound(r) / r).max()) * (1 + 1e-9)  # the rule includes the slope


def test_weighted_residual_stays_in_its_bound_and_comes_back() -> None:
    """Pushed against the bound it stops there; once the gradient turns, it leaves with the first steps."""
    layer = WeightedResidual(3, init=0.9, bound=1.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    seen = []
    for step in range(40):
        optimizer.zero_grad()
        y = layer(torch.ones(3)).sum()
        (-y if step < 20 else y).backward()
        optimizer.step()
        seen.append(layer.weights_D().detach().clone())
    assert bool((torch.stack(seen) <= 1).all())
    assert bool((seen[19] == 1).all())
    assert bool((seen[22] < 0.95).all())
    assert bool((seen[39] >= 0).all())
    assert bool((seen[39] < 0.1).all())
    x = torch.randn(4, 3)
    torch.testing.assert_close(WeightedResidual(3, init=0.25)(x), 0.25 * x)


def test_post_norm_block_by_its_equation() -> None:
    torch.manual_seed(0)
    attn, mlp = nn.Linear(D, D), Mlp(D, 2 * D)
    norm1, norm2 = scaled_(CenterNorm(D), 1.0), scaled_(CenterNorm(D), 1.0)
    block: Any = PostNormBlock(attn, mlp, norm1, norm2, residual=partial(WeightedResidual, D, init=0.3)).eval()
    x = torch.randn(2, N, D)
    middle = norm1(x + 0.3 * attn(x))
    torch.testing.assert_close(block(x), norm2(middle + 0.3 * mlp(middle)))


def test_one_norm_for_the_sum_where_nothing_weighs_the_branch() -> None:
    """The sum x + F(x) with F = -x / 2 (like attention of one token) has norm 1 / 2, not 3 / 2."""
    attn: Any = scaled_(DotProductAttention(4, 1), 0.0)
    with torch.no_grad():
        attn.qkv.weight[8:].copy_(torch.eye(4))
        attn.proj.weight.copy_(-0.5 * torch.eye(4))
        mlp = scaled_(Mlp(4, 4), 0.0)
    block = PostNormBlock(attn, mlp, nn.Identity(), nn.Identity()).double().requires_grad_(False)
    _, bound = layer_of(block)(torch.ones(1, 1, 4, dtype=torch.float64))
    assert float(bound(torch.ones(1, dtype=torch.float64))) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("name", ["lofast_vit_c10_aol", "lofast_vit_c10_orthogonal", "lips_vit_b", "lips_vit_l"])
def test_models_build_without_memory(name: str) -> None:
    with torch.device("meta"):
        model = zoo.create_model(name)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_lipsformer_is_made_of_its_parts() -> None:
    model: Any = zoo.create_model("lips_vit_ti", **SMALL)
    block = model.blocks[0]
    assert {type(block), type(block.norm1), type(block.scale1), type(model.norm)} == {
        PostNormBlock,
        CenterNorm,
        WeightedResidual,
    }
    torch.testing.assert_close(block.scale1.weights_D(), torch.full((D,), 1 / 12))
    assert float(sigma_upper(block.attn.qkv.weight)) <= 1
    assert float(model.blocks[1].drop_path.drop_prob) == pytest.approx(0.1)
