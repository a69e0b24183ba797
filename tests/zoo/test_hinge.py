"""The hinge on spectral norms against SVDs, its caps over time, and its effect on a training."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zoo
from certizoo import UserError
from trainers.settings import HingeConfig
from zoo.hinge import diagonal_norm, gram_of, hinge, norm_of_gram, without_size
from zoo.rules import conv_norm

CAPS = {"q": 0.5, "k": 0.6, "v": 0.7, "o": 0.4, "mlp": 0.8, "patch": 0.8}


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    model: Any = zoo.create_model("dp_vit_ti", init="spectral", **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def norms(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return norms of whole matrices, all heads together."""
    found = [("patch", model.patch_embed.proj.weight.flatten(1))]
    for block in model.blocks:
        found += zip("qkv", block.attn.qkv.weight.chunk(3), strict=True)
        found += [("o", block.attn.proj.weight), ("mlp", block.mlp.fc1.weight), ("mlp", block.mlp.fc2.weight)]
    return [(branch, torch.linalg.matrix_norm(weight, 2)) for branch, weight in found]


def slow(model: Any, caps: dict[str, float]) -> torch.Tensor:
    terms = [(norm - caps[branch]).clamp_min(0) ** 2 for branch, norm in norms(model) if branch in caps]
    return torch.stack(terms).sum()


def test_the_kernels_of_a_stem_are_matrices_the_last_one_the_patch_embedding() -> None:
    torch.manual_seed(0)
    model: Any = zoo.create_model("dp_vit_ti", img_size=16, patch_size=4, stem=(6,), embed_dim=8, depth=0, num_heads=2)
    nonlinear, last = model.patch_embed.kernels()
    assert [kernel.shape for kernel in (nonlinear, last)] == [(6, 27), (8, 54)]
    for branch, kernel in (("stem", nonlinear), ("patch", last)):
        oracle = (torch.linalg.matrix_norm(kernel, 2) - 0.3).clamp_min(0) ** 2
        assert 0.05 < oracle <= hinge(model, {branch: 0.3}) <= 1.1 * oracle
    for conv, height in zip(model.patch_embed.convs[::2], (8, 4), strict=True):
        kernel = torch.linalg.matrix_norm(conv.weight.flatten(1), 2)
        assert conv_norm(conv.weight, (2, 2), (height, height)) <= 2 * kernel, "as the head of the file says"


@pytest.mark.parametrize("shape", [(24, 24), (7, 40), (40, 7), (5, 24, 48)])
def test_gram_norm_is_an_upper_bound_and_nearly_the_norm(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    least = min(shape[-2:])
    cases = {"gaussian": torch.randn(shape), "flat": torch.nn.init.orthogonal_(torch.empty(shape[-2:]))}
    cases |= {"small": 1e-6 * torch.randn(shape), "large": 1e6 * torch.randn(shape)}
    for name, weight in cases.items():
        true = torch.linalg.matrix_norm(weight.double(), 2)
        ratio = norm_of_gram(gram_of(weight)).double() / true
        assert (ratio >= 1 - 1e-5).all(), name
        assert (ratio <= least ** (1 / 128) + 1e-5).all(), name
    flat = norm_of_gram(gram_of(torch.eye(least)))
    assert float(flat) == pytest.approx(least ** (1 / 128), rel=1e-5), "the bound of the docstring is reached"
    assert norm_of_gram(gram_of(torch.zeros(shape))).abs().max() < 1e-15


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_norm_of_a_diagonal_matrix_is_that_of_its_gram_with_gradient(scale: float) -> None:
    torch.manual_seed(0)
    entries = (scale * torch.randn(3, 24)).requires_grad_()
    short, long = diagonal_norm(entries), norm_of_gram(gram_of(torch.diag_embed(entries)))
    torch.testing.assert_close(short, long, rtol=1e-5, atol=0)
    gradients = [torch.autograd.grad(norm.sum(), entries)[0] for norm in (short, long)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_equals_the_slow_formula_with_gradient(model: Any) -> None:
    fast, oracle = hinge(model, CAPS), slow(model, CAPS)
    assert float(oracle.detach()) > 0.1
    assert oracle <= fast <= 1.1 * oracle
    weights = [block.attn.qkv.weight for block in model.blocks]
    for ours, theirs in zip(torch.autograd.grad(fast, weights), torch.autograd.grad(oracle, weights), strict=True):
        assert torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.9


@pytest.mark.parametrize("norm", ["centernorm", "layernorm", "smoothproject"])
def test_what_scales_the_output_of_a_norm_has_a_cap_of_its_own(norm: str) -> None:
    torch.manual_seed(0)
    model: Any = zoo.create_model("dp_vit_ti", norm=norm, embed_dim=24, depth=2, num_heads=3, img_size=32)
    gammas = [weight for name, weight in model.named_parameters() if "norm" in name and name.endswith("weight")]
    if norm == "smoothproject":  # the model has none
        with pytest.raises(ValueError, match="no weights of the branches"):
            hinge(model, {"norm": 1.5})
        return
    with torch.no_grad():
        for gamma in gammas:
            gamma.copy_(torch.randn(24) + 1)
    oracle = torch.stack([(gamma.abs().max() - 1.5).clamp_min(0) ** 2 for gamma in gammas]).sum()
    assert len(gammas) == 5
    assert 0.5 < oracle <= hinge(model, {"norm": 1.5}) <= 1.1 * oracle
    hinge(model, {"norm": 1.5}).backward()
    assert all(gamma.grad is not None for gamma in gammas)
    assert model.blocks[0].mlp.fc1.weight.grad is None


def test_free_branches_slack_and_norms_below_their_caps_cost_nothing(model: Any) -> None:
    free: dict[str, float | None] = {"q": 0.5, "k": None, "mlp": None}
    hinge(model, free).backward()
    q, k, v = model.blocks[0].attn.qkv.weight.grad.chunk(3)
    assert q.any()
    assert not k.any()
    assert not v.any()
    assert model.blocks[0].mlp.fc1.weight.grad is None
    assert hinge(model, CAPS, slack=10) == 0
    assert 0 < hinge(model, CAPS, slack=1.2) < hinge(model, CAPS)


def test_descent_brings_the_norms_under_their_caps(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(500):
        optimizer.zero_grad()
        hinge(model, CAPS).backward()
        optimizer.step()
    assert all(norm <= 1.02 * CAPS[branch] for branch, norm in norms(model))
    assert all(norm > 0.8 * CAPS[branch] for branch, norm in norms(model)), "and no further"


def test_a_model_without_such_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="no weights"):
        hinge(torch.nn.Linear(2, 2), CAPS)


def test_caps_shrink_geometrically_while_the_training_goes_through_tighten() -> None:
    config = HingeConfig(weight=1.0, q=0.5, slack=4.0, tighten=(0.25, 0.75))
    assert [config.slack_at(t) for t in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx([4, 4, 2, 1, 1])
    assert HingeConfig(weight=1.0, q=0.5).slack_at(0.0) == 1
    assert config.caps == {"q": 0.5} | dict.fromkeys(("k", "v", "o", "mlp", "patch", "stem", "norm"))
    assert config.active
    assert not HingeConfig().active


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"weight": -1}, "weight"),
        ({"q": 0.0}, "q=0.0"),
        ({"slack": 0.5}, "slack"),
        ({"tighten": (0.7, 0.2)}, "tighten"),
    ],
)
def test_wrong_values_are_named(wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        HingeConfig(**wrong)


@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e15, 1e30])
@pytest.mark.parametrize("shape", [(6, 8), (8,)])
def test_norms_far_from_1_have_values_and_gradients(size: float, shape: tuple[int, ...]) -> None:
    """In float32 the squares in their Gram matrix are 0 or infinite.

    The hinge itself is a square, which ends at 1e19.
    """
    torch.manual_seed(0)
    unit = torch.randn(shape, dtype=torch.float64)
    weight = (size * unit).float().requires_grad_()
    largest, shared = without_size(weight)
    norm = largest * (norm_of_gram(gram_of(shared)) if len(shape) == 2 else diagonal_norm(shared))
    true = torch.linalg.matrix_norm(unit, 2) if len(shape) == 2 else unit.abs().amax()
    assert 1 - 1e-5 <= float(norm) / (size * float(true)) <= 1.05
    (gradient,) = torch.autograd.grad(norm, weight)
    assert gradient.isfinite().all()
    assert 0.9 <= gradient.double().norm() <= 1.1


@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e15, 1e18])
def test_the_hinge_has_values_and_gradients_far_from_1(size: float) -> None:
    torch.manual_seed(0)
    for module in (Capped(torch.nn.Linear(8, 6)), torch.nn.LayerNorm(8)):
        (weight, *_) = module.parameters()
        with torch.no_grad():
            weight.copy_(size * torch.randn_like(weight))
        value = hinge(module, {"mlp": 1.0, "norm": 1.0})
        (gradient,) = torch.autograd.grad(value, weight)
        assert value.isfinite()
        assert gradient.isfinite().all()
        assert (size > 1) == bool(value > 0)


class Capped(torch.nn.Module):
    """A module with one matrix, of the branch "mlp"."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def spectral_terms(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Return the terms that `zoo.hinge` reads."""
        yield "mlp", self.linear.weight[None], torch.empty(0)
