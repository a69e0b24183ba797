"""MSVP (eq. 14 of SpecFormer) against the slow formula with SVDs, head by head."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zoo
from zoo.penalty import msvp, settle_
from zoo.spectral import power_step


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return zoo.create_model("spec_vit_ti", img_size=32, embed_dim=24, depth=3, num_heads=3, num_classes=5)


def slow(model: Any, *lambdas: float) -> torch.Tensor:
    """Return the sum over layers, heads and branches of lambda sigma_max^2; heads are rows of the stored weight."""
    total = torch.zeros(())
    for block in model.blocks:
        for weight, lam in zip(block.attn.qkv.weight.chunk(3), lambdas, strict=True):
            for head in weight.chunk(3):
                total = total + lam * torch.linalg.matrix_norm(head, 2) ** 2
    return total


def converge(model: Any) -> None:
    for _ in range(400):
        msvp(model, 1, 1, 1)


def test_equals_the_slow_formula_with_gradient(model: Any) -> None:
    converge(model)
    fast, oracle = msvp(model, 0.1, 0.2, 0.3), slow(model, 0.1, 0.2, 0.3)
    torch.testing.assert_close(fast, oracle, rtol=1e-4, atol=0)
    weights = [block.attn.qkv.weight for block in model.blocks]
    for ours, theirs in zip(torch.autograd.grad(fast, weights), torch.autograd.grad(oracle, weights), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3 * float(theirs.abs().max()))


def test_one_step_is_never_above_the_truth(model: Any) -> None:
    for _ in range(5):
        assert msvp(model, 1, 1, 1) <= slow(model, 1, 1, 1) * (1 + 1e-5)


def test_settled_vectors_are_near_the_truth_at_the_first_step(model: Any) -> None:
    with torch.no_grad():
        raw = msvp(model, 1, 1, 1)
        settle_(model)
        settled, truth = msvp(model, 1, 1, 1), slow(model, 1, 1, 1)
    assert raw < 0.9 * truth
    assert 0.97 * truth <= settled <= (1 + 1e-5) * truth


def test_branches_are_separate(model: Any) -> None:
    msvp(model, 0.0, 0.0, 1.0).backward()
    q, k, v = model.blocks[0].attn.qkv.weight.grad.chunk(3)
    assert not q.any()
    assert not k.any()
    assert v.any()


def test_vectors_move_once_a_call_and_travel_in_the_state(model: Any) -> None:
    key = "blocks.0.attn.power_3HD"
    before = model.state_dict()[key].clone()
    with torch.no_grad():
        msvp(model, 1, 1, 1)
    assert torch.equal(model.state_dict()[key], before), "evaluation must not change a checkpoint"
    msvp(model, 1, 1, 1)
    assert not torch.equal(model.state_dict()[key], before)
    model.train()(torch.rand(2, 3, 32, 32))
    moved = model.state_dict()[key].clone()
    model(torch.rand(2, 3, 32, 32))
    assert torch.equal(model.state_dict()[key], moved), "forward knows nothing of the penalty"


def test_descending_the_penalty_lowers_the_true_norms(model: Any) -> None:
    converge(model)
    before = slow(model, 1, 1, 1).item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        msvp(model, 1, 1, 1).backward()
        optimizer.step()
    assert slow(model, 1, 1, 1).item() < 0.5 * before


def test_works_under_bfloat16(model: Any) -> None:
    value = msvp(model.bfloat16(), 1, 1, 1)
    assert value.dtype == torch.float32
    assert torch.isfinite(value)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="no weights"):
        msvp(torch.nn.Linear(2, 2), 1, 1, 1)
    with pytest.raises(ValueError, match="lambda_k"):
        msvp(torch.nn.Linear(2, 2), 1, -1, 1)


def test_output_projections_and_mlps_are_optional_terms(model: Any) -> None:
    for _ in range(400):
        msvp(model, 0, 0, 0, 1, 1)
    weights = [[block.attn.proj.weight] for block in model.blocks]
    mlps = [[block.mlp.fc1.weight, block.mlp.fc2.weight] for block in model.blocks]

    def oracle(groups: Any) -> float:
        return sum(float(torch.linalg.matrix_norm(w.detach(), 2) ** 2) for group in groups for w in group)

    assert msvp(model, 0, 0, 0, lambda_o=0.5).item() == pytest.approx(0.5 * oracle(weights), rel=1e-4)
    assert msvp(model, 0, 0, 0, lambda_mlp=0.5).item() == pytest.approx(0.5 * oracle(mlps), rel=1e-4)


def test_a_branch_that_is_off_is_not_computed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At lambda 0 there is no power iteration and no graph, and vectors stay unchanged."""
    rows: list[int] = []

    def counted(weight: Any, v: Any) -> Any:
        rows.append(weight.flatten(0, -3).shape[0])
        return power_step(weight, v)

    monkeypatch.setattr(zoo.penalty, "power_step", counted)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert not msvp(model, 0, 0, 0).requires_grad
    assert rows == []
    msvp(model, 0, 0, 1)
    assert rows == [3 * 3], "3 layers x 3 heads of W_V alone"
    for key, value in model.state_dict().items():
        still = value[:2] if key.endswith("power_3HD") else value  # W_Q and W_K
        assert torch.equal(still, before[key][: len(still)] if still.ndim else before[key]), key


def test_the_penalty_is_part_of_a_usual_loss(model: Any) -> None:
    loss = F.cross_entropy(model(torch.rand(4, 3, 32, 32)), torch.arange(4)) + msvp(model, 1e-3, 1e-3, 1e-3)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
