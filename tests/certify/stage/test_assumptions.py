"""The assumptions of a certificate are a list of sentences, each with an anchor where it is explained."""

import re
from itertools import product
from pathlib import Path

import pytest

from certify.stage import assumptions as module
from certify.stage.assumptions import EVERY, assumptions

PROOFS = (Path(__file__).parents[3] / module.PROOFS).read_text()
ANCHORS = set(re.findall(r'<a id="([^"]+)"></a>', PROOFS))


CASES = list(product((None, "float32", "bfloat16"), (0.0, 1e-5), (False, True)))


@pytest.mark.parametrize("of", CASES, ids=str)
def test_every_assumption_has_its_place_in_the_proofs(of: tuple[str | None, float, bool]) -> None:
    found = assumptions(*of)
    assert found
    for assumption in found:
        assert assumption.anchor in ANCHORS, assumption
        assert re.fullmatch(r"[A-Za-z][^\n]*\.", assumption.sentence), assumption
        assert assumption.said() == {"sentence": assumption.sentence, "proof": f"docs/proofs.md#{assumption.anchor}"}
    assert len({assumption.sentence for assumption in found}) == len(found)


def test_every_sentence_is_said_of_something() -> None:
    assert set(EVERY) <= {assumption for of in CASES for assumption in assumptions(*of)}


def test_chance_is_assumed_only_where_there_is_some() -> None:
    without, with_chance = (assumptions("float32", failure, False) for failure in (0.0, 1.24e-5))
    assert with_chance[: len(without)] == without
    assert [a.sentence for a in with_chance[len(without) :] if "2e-05 for all images" in a.sentence]  # never fewer
    assert module.RANDOM in with_chance
    assert module.RANDOM not in without


def test_crown_rests_on_what_auto_lirpa_computes() -> None:
    assert module.CROWN in assumptions(None, 0.0, True)
    assert module.CROWN not in assumptions(None, 0.0, False)


def test_a_served_model_has_its_rounding_proved() -> None:
    served, exact = (assumptions(dtype, 0.0, False) for dtype in ("float32", None))
    assert set(module.SERVED) <= set(served)
    assert module.EXACT not in served
    assert module.EXACT in exact
    assert not set(module.SERVED) & set(exact)
