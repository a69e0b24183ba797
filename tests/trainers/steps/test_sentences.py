"""A training step of sentences: words learn from clean and from attacked points, and images pass as before."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from certizoo.attacks import AttackConfig
from trainers.objectives import OBJECTIVES, OF_TEXT, Probe
from trainers.settings import ObjectiveConfig
from trainers.steps.sentences import embedded
from zoo.models.overview import tiny_options
from zoo.models.sentences import Padded

NAME = "lofast_text_l3_h4"
NUMBERS_BN = torch.tensor([[2, 3, 4, 0], [5, 0, 0, 0], [6, 7, 2, 3]])
EPS = 0.2


class Seen(nn.Module):
    """The model, and the point at which it was asked last."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model: Any = zoo.create_model(name, **options)
        self.points: list[Tensor] = []

    def through(self, measure: Any, *inputs: Any) -> Any:
        self.points.append(inputs[0])
        return measure(self.model, *inputs)

    def attack(self, x: Tensor, labels_B: Tensor, kept_BN: Tensor | None = None) -> Tensor:
        attack = AttackConfig("l2", EPS, 3)
        if kept_BN is None:
            return attack.run(self.model, x, labels_B, keep_worst=False)
        padded = Padded(self.model, kept_BN)
        return attack.run(padded, x, labels_B, keep_worst=False, disturb=padded.still)

    def probe(self, objective: str) -> Probe:
        return Probe(self.through, self.attack, self.model, ObjectiveConfig(name=objective, eps=EPS))


@pytest.mark.parametrize("objective", OF_TEXT)
def test_words_learn_at_the_point_that_the_objective_sees(objective: str) -> None:
    seen, labels_B = Seen(NAME, **tiny_options(NAME)), torch.tensor([0, 1, 0])
    probe, batch = embedded(seen.probe(objective), seen.model, (NUMBERS_BN, labels_B))
    terms = OBJECTIVES[objective](probe, *batch)
    terms["loss"].backward()
    words: Any = seen.model.patch_embed.words.grad
    assert set(words.abs().sum(1).nonzero().flatten().tolist()) == {2, 3, 4, 5, 6, 7}
    clean = seen.model.patch_embed.embed(NUMBERS_BN)
    moved_B = (seen.points[-1] - clean).flatten(1).norm(dim=1)
    assert (moved_B <= (EPS if objective == "pgd_at" else 0) * (1 + 1e-5)).all()
    assert objective != "pgd_at" or (moved_B > EPS / 2).all()
    assert not (seen.points[-1] - clean).transpose(1, 2)[NUMBERS_BN == 0].any()


@pytest.mark.parametrize("objective", sorted({*OF_TEXT} - {"pgd_at"}))
def test_a_padded_batch_has_the_loss_and_the_gradient_of_its_sentences(objective: str) -> None:
    """Attacks start at random points of the batch and are left out."""
    labels_B = torch.tensor([0, 1, 0])

    def loss_and_gradient(numbers_BN: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
        seen = Seen(NAME, **tiny_options(NAME))
        seen.double()
        probe, batch = embedded(seen.probe(objective), seen.model, (numbers_BN, labels_B))
        loss = OBJECTIVES[objective](probe, *batch)["loss"]
        (words,) = torch.autograd.grad(loss, seen.model.patch_embed.words)
        return loss.detach(), words

    together = loss_and_gradient(NUMBERS_BN, labels_B)
    each = [
        loss_and_gradient(numbers_N[None, numbers_N > 0], label[None])
        for numbers_N, label in zip(NUMBERS_BN, labels_B, strict=True)
    ]
    for found, of_each in zip(together, zip(*each, strict=True), strict=True):
        assert found.abs().sum() > 0
        torch.testing.assert_close(found, sum(of_each) / len(of_each), rtol=1e-9, atol=1e-12)


def test_images_pass_as_before() -> None:
    seen = Seen("spec_vit_digits")
    probe, batch = seen.probe("clean"), (torch.rand(2, 1, 8, 8), torch.tensor([0, 1]))
    assert embedded(probe, seen.model, batch) == (probe, batch)
