"""The trials detect a wrong radius, stay in the ball, cover the zoo, and count correctly."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from benchmarks import record
from benchmarks import trials as benchmark
from tests.tools import trials
from tests.tools.cases import mostly_slow
from tests.tools.small_models import distinct
from tests.tools.trials import KINDS, METHODS, NORMS, TRAINED, WEIGHTS, Subject, inside, numbered, outcomes

SUBJECT = Subject("smooth", TRAINED, 0)


@pytest.mark.parametrize(
    ("method", "norm"),
    mostly_slow(product(METHODS, NORMS), ("lofast_local", "l2"), ("adjoint", "l2"), ("lofast_local", "linf")),
)
def test_a_wrong_radius_is_beaten_and_the_right_one_is_not(
    method: str, norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (honest,) = outcomes(SUBJECT, 4, 8, [method], [norm])
    assert honest.worth == 4
    assert not honest.beaten_B.any()
    monkeypatch.setattr(trials, "certified", lambda *_, **__: 64 * honest.radius_B)
    (wrong,) = outcomes(SUBJECT, 4, 8, [method], [norm])
    assert wrong.beaten_B.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", NORMS)
def test_a_rounded_point_lies_in_the_ball(norm: str, dtype: torch.dtype) -> None:
    """It also holds where rounding is as large as the ball and the point lies on its boundary."""
    p = 2 if norm == "l2" else torch.inf
    x = torch.rand(60, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    radius_B = torch.logspace(-9, 1, 60, dtype=torch.float64)
    within_B = inside(x, radius_B, norm, dtype)
    g = torch.randn(60, 3, 8, 8, dtype=torch.float64)
    g = g / g.flatten(1).norm(dim=1, p=p).view(-1, 1, 1, 1)
    far_B = ((x.double() + within_B.view(-1, 1, 1, 1) * g).to(dtype).double() - x.double()).flatten(1).norm(dim=1, p=p)
    assert (far_B <= radius_B)[within_B > 0].all()
    assert (within_B >= 0.99 * radius_B)[radius_B > 1e-3].all()


def test_all_of_the_zoo_meets_all_weights_and_no_seed_comes_twice() -> None:
    subjects = [numbered(number) for number in range(len(WEIGHTS) * len(KINDS))]
    assert {(s.kind, s.weights) for s in subjects} == {(kind, weights) for kind in KINDS for weights in WEIGHTS}
    assert {name for names in distinct().values() for name in names} == set(zoo.list_models())
    assert set(distinct()) < set(KINDS)
    assert [s.seed for s in subjects] == list(range(len(subjects)))


@pytest.mark.slow
def test_every_method_is_there_in_both_norms_and_a_subject_can_be_had_again() -> None:
    subject = Subject("smooth", "small", 1)
    once, again = list(outcomes(subject, 1, 2)), list(outcomes(subject, 1, 2, ["lofast_local", "best"]))
    assert [(o.method, o.norm) for o in once] == [(method, norm) for method in METHODS for norm in NORMS]
    radii = {(o.method, o.norm): o.radius_B for o in once}
    assert again
    assert all(torch.equal(other.radius_B, radii[other.method, other.norm]) for other in again)


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the benchmark with two images and one method, writing into the test's folder."""
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    monkeypatch.setattr(benchmark, "IMAGES", 2)
    monkeypatch.setattr(benchmark, "STARTS", dict.fromkeys(benchmark.STARTS, 4))
    monkeypatch.setattr(
        benchmark, "outcomes", lambda subject, images, starts: outcomes(subject, images, starts, ["lofast_local"])
    )
    return tmp_path / "trials.json"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["trials", *arguments])
    benchmark.main()


def test_a_run_goes_on_with_other_seeds(counted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--trials", "17")
    once = json.loads(counted.read_text())
    run(monkeypatch, "--trials", "1")
    twice = json.loads(counted.read_text())
    (first,), second = once["runs"], twice["runs"][1]
    assert first["trials"] >= 17
    assert first["seeds"][0] == 0
    assert second["seeds"][0] == first["seeds"][1] + 1
    assert twice["runs"][0] == first
    assert twice["trials"] == first["trials"] + second["trials"] == sum(row["trials"] for row in twice["rows"])
    assert [(row["norm"], row["method"]) for row in twice["rows"]] == [("l2", "lofast_local"), ("linf", "lofast_local")]
    models = second["seeds"][1] + 1
    assert all(row["models"] == models and row["images"] == 2 * models for row in twice["rows"])
    assert twice["beaten"] == []


def test_time_ends_a_run(counted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--minutes", "0.0001")
    assert json.loads(counted.read_text())["runs"][0]["seeds"] in ([0, 0], [0, -1])


def test_a_beaten_certificate_is_written_down_whole_and_fails(counted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.full((len(x),), 50.0, dtype=torch.float64)

    with monkeypatch.context() as patch:
        patch.setattr(trials, "certified", wrong)
        with pytest.raises(SystemExit, match="beaten"):
            run(monkeypatch)
    found = json.loads(counted.read_text())
    case = found["beaten"][0]
    assert sum(row["beaten"] for row in found["rows"]) == len(found["beaten"])
    subject = Subject(case["kind"], case["weights"], case["seed"])
    assert (subject.name, json.loads(json.dumps(subject.options))) == (case["model"], case["options"])
    again = next(outcomes(subject, case["images"], case["starts"], [case["method"]], [case["norm"]]))
    assert not again.beaten_B.any(), "at the right radius"
    assert case["radius"] == 50
    assert case["margin_loss"] >= 0
    with pytest.raises(SystemExit, match="beaten"):  # until someone has reviewed it
        run(monkeypatch)
