"""EMMA, logit annealing and the second-order term follow their formulas, image by image, by central differences."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.tools.objective_oracles import ORACLES, batch, probe_of, small_vit
from trainers.objectives import OBJECTIVES
from trainers.objectives.curvature import slopes_and_bends
from trainers.settings import ObjectiveConfig

SETTINGS = ObjectiveConfig("any", eps=0.7, curvature=1.5, offset=1.0, temperature=0.5, gamma=3.0)


@pytest.mark.parametrize("name", ORACLES)
def test_loss_and_gradient_are_those_of_the_equation(name: str) -> None:
    model, (images, labels) = small_vit().double(), batch()
    for module in model.modules():  # weights large enough for the terms to differ
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(2.0)
    images = images.double()
    labels[:4] = model(images).argmax(1)[:4]  # margins above 0 and below
    loss = OBJECTIVES[name](replace(probe_of(model), settings=SETTINGS), images, labels)["loss"]
    expected = torch.stack(
        [ORACLES[name](model, x, y, SETTINGS) for x, y in zip(images, labels.tolist(), strict=True)]
    ).mean()
    weights = list(model.parameters())
    assert abs(float(loss.detach()) - float(expected.detach())) <= 1e-6
    for got, wanted in zip(torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights), strict=True):
        assert (got - wanted).norm() <= 1e-5 * (1 + wanted.norm())


def test_emma_is_cross_entropy_where_nothing_is_left_and_lmce_where_all_is() -> None:
    model, images = small_vit().double(), batch(16)[0].double()
    answers = model(images).argmax(1)
    wrong = (answers + 1) % 5

    def loss(name: str, labels: Tensor, eps: float) -> float:
        return float(OBJECTIVES[name](probe_of(model, name=name, eps=eps), images, labels)["loss"].detach())

    assert loss("emma", answers, 1e-6) == pytest.approx(loss("lmce", answers, 1e-6), rel=1e-9)
    assert loss("emma", answers, 50.0) < loss("lmce", answers, 50.0)
    assert loss("emma", wrong, 50.0) < loss("lmce", wrong, 50.0)
    terms = OBJECTIVES["emma"](probe_of(model, name="emma", eps=1e-6), images, answers)
    assert float(terms["reach"]) == pytest.approx(1, abs=1e-3)


def test_annealing_lets_go_of_large_margins() -> None:
    """The gradient of a confident image is about (1 - p)^gamma times that of cross-entropy, which is 1 - p."""
    logits = torch.tensor([[8.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    probe = probe_of(nn.Identity(), name="logit_annealing", offset=0.0, temperature=1.0, gamma=5.0)
    labels = torch.zeros(2, dtype=torch.int64)
    (found,) = torch.autograd.grad(OBJECTIVES["logit_annealing"](probe, logits, labels)["loss"], logits)
    (plain,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, labels), logits)
    share = (found.norm(dim=1) / plain.norm(dim=1)).tolist()
    assert share[0] < 1e-12 < 1e-2 < share[1]


def test_a_linear_margin_does_not_bend_and_both_passes_drop_the_same_paths() -> None:
    images, labels = batch()
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 5)).double()
    _, slope, bend = slopes_and_bends(linear, images.double(), labels, 0.0, SETTINGS.eps)
    assert (bend < 1e-5).all()
    assert (slope > 0.1).all()
    dropping = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 5)).double().train()
    _, _, bend = slopes_and_bends(dropping, images.double(), labels, 0.0, SETTINGS.eps)
    assert (bend < 1e-5).all(), "what is dropped would count as a bend"


def test_the_second_pass_moves_no_power_iteration() -> None:
    images, labels = torch.rand(2, 1, 8, 8), torch.tensor([0, 1])
    ends = []
    for name in ("lmce", "curvature"):
        torch.manual_seed(0)
        model = zoo.create_model("spec_vit_digits").train()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        OBJECTIVES[name](probe_of(model, name=name, eps=0.1), images, labels)
        ends.append(model.state_dict())
    assert all(torch.equal(ends[0][key], value) for key, value in ends[1].items())
    assert any(not torch.equal(before[key], value) for key, value in ends[1].items())
