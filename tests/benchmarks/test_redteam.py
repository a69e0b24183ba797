"""The red team counts correctly, detects planted faults, and finds no false claim with a small budget."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import record, redteam
from benchmarks.redteam import __main__ as command
from benchmarks.redteam import claims, lemmas, pairs, scales, weights
from benchmarks.redteam.finding import Finding, Tally
from tests.tools.forgeries import value_and_projection
from tests.tools.trials import Subject
from zoo.models.overview import tiny_options

SUBJECT = Subject("smooth", "medium", 0)
SECONDS = 25  # trials of each attack


@pytest.mark.slow
@pytest.mark.parametrize("name", command.ATTACKS)
def test_no_claim_is_refuted_within_a_small_budget(name: str) -> None:
    tally = command.attacked([name], seed=0, seconds=SECONDS)
    assert tally.rows()
    assert not tally.refuted, tally.refuted


def test_ratios_and_tries_are_kept_by_attack_and_case() -> None:
    tally = Tally()
    for ratio, tries in ((0.5, 3), (0.2, 4)):
        tally.add("pairs", Finding("adjoint l2", ratio, tries, {"seed": tries}))
    (row,) = tally.rows()
    assert row == {"attack": "pairs", "case": "adjoint l2", "ratio": 0.5, "tries": 7, "where": {"seed": 3}}
    assert not tally.refuted
    for wrong in (1.5, float("nan")):
        tally.add("pairs", Finding("adjoint l2", wrong))
    assert len(tally.refuted) == 2


def test_a_false_claim_is_written_down_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lying(seed: int) -> Iterator[Finding]:
        while True:
            yield Finding("adjoint l2", 2.0, where={"seed": seed})

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["redteam", "--minutes", "0.001", "--only", "pairs", "--seed", "7"])
    monkeypatch.setitem(command.ATTACKS, "pairs", lying)
    with pytest.raises(SystemExit, match="false"):
        command.main()
    found = json.loads((tmp_path / "redteam.json").read_text())
    assert found["rows"][0]["ratio"] == 2
    assert found["rows"][0]["tries"] == len(found["refuted"]) > 0
    assert found["refuted"][0] == found["rows"][0] | {"tries": 1}


def test_a_radius_that_is_too_large_is_seen() -> None:
    """In a ball four times the claimed radius, a nearly linear model loses more than the claimed loss."""
    model, x = SUBJECT.model(), SUBJECT.images(2)
    analysis = claims.analysis_of(model, x, "adjoint", "l2")
    assert analysis is not None
    claim = claims.certified_claim(analysis)
    assert (claim.eps_B > 0).all()
    assert 0.1 < claims.ratio(model, x, analysis, claim, "l2") <= 1
    wrong = claims.Claim(4 * claim.eps_B, claim.rival_B, claim.loss_B)
    assert claims.ratio(model, x, analysis, wrong, "l2") > 1


def test_weights_climb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "CLIMB", 2)
    start = weights.State.of(SUBJECT.model(), SUBJECT.images(1), "lofast", "l2")
    assert start is not None
    assert weights.climbed(start, "lofast", "l2", 0, steps=4).ratio > 1.2 * start.ratio
    trial: Any = weights.Climbed.after(SUBJECT)
    assert trial.seed == SUBJECT.seed
    assert not torch.equal(trial.model().head.weight, SUBJECT.model().head.weight)


def test_sentences_of_every_length_are_attacked() -> None:
    name, lengths = "lofast_text_l3_h4", set()
    tokens = tiny_options(name)["img_size"]
    for seed in range(tokens):
        subject = Subject(name, "medium", seed)
        lengths.add(subject.images(1).shape[2])
        if seed < 3:
            start = weights.State.of(subject.model(), subject.images(1), "adjoint", "l2")
            assert start is not None
            assert 0 < start.ratio <= 1
    assert lengths == set(range(1, tokens + 1))


def test_a_pair_without_a_huge_scale_is_an_honest_model() -> None:
    """Without the scale the ratio must stay below 1, so that a larger one is due to the scale.

    Most of the architectures drawn must also depend on one pixel.
    """
    for method in ("lofast", "lofast_local", "adjoint"):
        found = pairs.ratio(value_and_projection, 1.0, method, "l2")
        assert found is not None
        assert found <= 1
    drawn = (pairs.drawn(torch.Generator().manual_seed(seed)) for seed in range(8))
    assert sum(pairs.ratio(build, 1.0, "lofast", "l2") is not None for _, build in drawn) >= 4


@pytest.mark.slow
def test_every_promise_of_every_type_is_climbed_on() -> None:
    """Every module type has modules to try; this test runs some of the searches."""
    searches = lemmas.searches()
    assert len(searches) > 80
    for search in searches[4::20]:
        assert all(0 <= finding.ratio <= 1 for finding in islice(search(lemmas.FIRST_SEED), 4))


def test_scaled_models_are_the_same_function() -> None:
    seen = set()
    for kind in ("standard", "cls", "fc_norm"):
        subject = Subject(kind, "medium", 0)
        plain, x = subject.model().double(), subject.images(2).double()
        for place in scales.places(plain):
            scaled = subject.model().double()
            scales.places(scaled)[place](2.0**40)
            torch.testing.assert_close(scaled(x), plain(x), rtol=1e-9, atol=1e-9)
            seen.add(place.rpartition(": ")[2])
    assert seen == {"values, projection", "norm1, qkv", "norm2, fc1", "last norm, head"}


def test_shapes_are_those_that_torch_broadcasts() -> None:
    assert {(1,), (1, 16), (4, 16), (4, 1), ()} <= set(scales.shapes((16,), 4))
    model, x = SUBJECT.model(), SUBJECT.images(2)
    generator = torch.Generator().manual_seed(0)
    assert scales.answers(scales.with_shape(model, "pos_embed", (1, 1, 16), generator), x)
    assert not scales.answers(scales.with_shape(model, "head.weight", (3, 7), generator), x)


def test_the_package_names_its_attacks() -> None:
    assert all(f"    {name} " in str(redteam.__doc__) for name in command.ATTACKS)
