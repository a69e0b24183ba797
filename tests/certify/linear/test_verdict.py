"""Verdicts hold: no attack reaches a proved property, and a refuting image is in the box and of another class."""

import time
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from benchmarks.vnncomp import vit
from certify.linear.backward import Bounds, lowest
from certify.linear.branch import Search
from certify.linear.capture import program_of
from certify.linear.enclosures.steps import Box
from certify.linear.tuned import tuned
from certify.linear.verdict import PROVED, REFUTED, UNKNOWN, decide
from tests.tools.ascent import ascend_box, margin_loss
from tests.tools.exported_vit import exported, published_vit


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(10, 3)).double().eval()


def box_around(x: Tensor, eps: float) -> Box:
    return Box(x - eps, x + eps)


@pytest.mark.parametrize("seed", range(2))
def test_verdicts_and_attacks_agree(seed: int) -> None:
    """Between the bound of CROWN and the nearest attack, branch and bound decides nearly everything."""
    model = net(seed)
    x = torch.rand(1, 1, 2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        y = model(x).argmax(1)
    program = program_of(model, (1, 2, 3))
    answers = []
    for eps in (0.01, 0.1, 0.3, 0.5, 2.0):
        found = decide(model, program, box_around(x, eps), int(y), 4)
        worst = float(ascend_box(margin_loss(model, y), x, torch.full((1,), eps, dtype=torch.float64), 30, 5))
        assert found.answer != PROVED or worst < 0
        assert found.answer != REFUTED or found.image is not None
        if found.image is not None:
            assert float((found.image - x).abs().max()) <= eps * (1 + 1e-12)
            assert int(model(found.image).argmax(1)) != int(y)
        answers.append(found.answer)
    assert answers[0] == PROVED
    assert answers[-1] == REFUTED
    assert answers.count(UNKNOWN) <= 1


def test_parts_prove_what_lines_do_not() -> None:
    """The margin's least value on the box is found to a third of what the lines of the whole box leave."""
    model = net(1)
    x = torch.rand(1, 1, 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        y = int(model(x).argmax(1))
        bounds = Bounds.on(program_of(model, (1, 2, 3)), Box(x.unsqueeze(1) - 0.4, x.unsqueeze(1) + 0.4))
        rows = (torch.eye(3)[y] - torch.eye(3)[(y + 1) % 3]).double().view(1, 1, 3)
        plain, best = float(lowest(bounds, rows)), float(tuned(bounds, rows))
        eps = torch.full((1,), 0.4, dtype=torch.float64)
    least = -float(ascend_box(lambda z: -(model(z) @ rows.view(3)), x, eps, 40, 10))
    assert plain <= best < least
    with torch.no_grad():
        logits = model[-1]
        assert isinstance(logits, nn.Linear)
        logits.bias[y] += 0.3 * (least - plain) - least  # now the least value is a third
        bounds = Bounds.on(program_of(model, (1, 2, 3)), Box(x.unsqueeze(1) - 0.4, x.unsqueeze(1) + 0.4))
    search = Search(bounds, rows[0])
    assert bool(search.run(time.monotonic() + 20).all())
    assert search.parts > 1 or best > plain


@pytest.mark.slow
def test_parts_of_a_transformer_hold() -> None:
    """On a box that lines alone do not prove, parts prove nothing that ascent refutes."""
    model = vit.read(exported(published_vit(0)))
    x = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        y = model(x).argmax(1)
    for eps in (0.01, 0.02, 0.04):
        bounds = Bounds.on(program_of(model, (3, 8, 8)), Box(x.unsqueeze(1) - eps, x.unsqueeze(1) + eps))
        classes = torch.eye(model.num_classes, dtype=torch.float64)
        search = Search(bounds, torch.stack([classes[y[0]] - row for j, row in enumerate(classes) if j != y[0]]))
        proved = bool(search.run(3, partial(next, iter(range(3)), 3)).all())
        if search.parts > 1:
            break
    assert search.parts > 1
    found = decide(model, bounds.program, box_around(x, eps), int(y), 1)
    worst = ascend_box(margin_loss(model, y), x, torch.full((1,), eps, dtype=torch.float64), 30, 3)
    assert not (proved or found.answer == PROVED) or float(worst) < 0
