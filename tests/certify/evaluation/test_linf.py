"""The evaluation with Linf radii: it runs attacks of both norms and catches points that refute the radii."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors import safe_open

from certify import api
from certify.evaluation import evaluate_block
from certify.evaluation import run as evaluation
from certify.evaluation.protocol import covering
from certify.shared.certificate import UnsoundCertificate
from certizoo import UserError
from certizoo.attacks import AttackConfig
from certizoo.attacks.kinds import make
from certizoo.attacks.norms import distance
from tests.tools.stage_runs import data

EPS = 4 / 255
ATTACKS = {
    "linf": {"kind": "pgd", "norm": "linf", "eps": EPS, "steps": 10, "loss": "margin"},
    "auto": {"kind": "autoattack", "norm": "linf", "eps": EPS, "attacks": ["apgd-ce"]},
    "l2": {"kind": "pgd", "norm": "l2", "eps": EPS, "steps": 5, "loss": "margin"},
    "far": {"kind": "pgd", "norm": "linf", "eps": 0.3, "steps": 10, "loss": "margin"},
}
SETTINGS = evaluation.Settings(
    "test", ATTACKS, method="adjoint", norm="linf", images=30, block=15, batch_size=15, check_images=0, nonce="n"
)


@pytest.fixture(scope="module")
def whole(handover: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    evaluation.run(handover, data(digits), SETTINGS, out)
    return out


@pytest.mark.slow
def test_what_is_certified_in_linf_survives_the_attacks_that_its_ball_holds(whole: Path) -> None:
    table, summary = pd.read_parquet(whole / evaluation.TABLE), json.loads((whole / evaluation.EVALUATION).read_text())
    for name in ATTACKS:
        eps = 0.3 if name == "far" else EPS
        assert (table[f"certified.{name}"] == (table["radius.adjoint"] >= eps)).all()
        assert (table[f"certified.{name}"] <= table[f"survives.{name}"]).all()
        assert (table[f"survives.{name}"] <= table["correct"]).all()
        broken = table["correct"] & ~table[f"survives.{name}"]
        assert (table[f"linf.{name}"].notna() == broken).all()
        assert (table.loc[broken, f"linf.{name}"] > table.loc[broken, "radius.adjoint"]).all()
    assert 0 < summary["accuracy"]["linf"]["certified"]["accuracy"] <= summary["clean"]
    assert summary["found_within_certified_radius"] == 0
    assert summary["accuracy"]["far"]["median_l2"] > 0.3
    assert summary["norm"] == "linf"
    assert summary["worst_case"][0]["attacks"] == ["linf", "auto"], "the L2 ball of the same eps is another"
    assert "radii in Linf" in (whole / evaluation.CARD).read_text()


def test_rows_of_the_other_norm_are_not_continued(handover: Path, digits: Path, whole: Path) -> None:
    with pytest.raises(UserError, match="another norm"):
        evaluation.run(handover, data(digits), replace(SETTINGS, norm="l2"), whole)


def test_a_wrong_certificate_in_linf_is_caught_by_its_own_distance(
    handover: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted radii are 20 times too large; the L2 distance of the points found would not reveal it."""
    monkeypatch.setattr(evaluate_block, "radius_of", lambda analysis: 20 * api.radius_of(analysis))
    settings = replace(SETTINGS, attacks={"far": ATTACKS["far"]})
    with pytest.raises(UnsoundCertificate, match=r"\(Linf\)"):
        evaluation.run(handover, data(digits), settings, tmp_path)
    (path,) = (tmp_path / "refuted").iterdir()
    with safe_open(path, "pt") as file:
        image, found, facts = file.get_tensor("image"), file.get_tensor("adversarial"), file.metadata()
    far = float(distance(found[None], image[None], "linf"))
    assert far == pytest.approx(float(facts["linf"]))
    assert far <= float(facts["certified_radius"])


@pytest.mark.parametrize(
    ("of", "norm", "wanted"), [("l2", "l2", 0.1), ("linf", "linf", 0.1), ("l2", "linf", 0.1), ("linf", "l2", 0.8)]
)
def test_the_smallest_ball_around_an_attacks_ball(of: str, norm: str, wanted: float) -> None:
    """The radius is the largest length of a vector of the ball in the other norm."""
    attack = AttackConfig(norm=of, eps=0.1)
    found = covering(attack, norm, 64)
    assert found is not None
    assert found == pytest.approx(wanted)
    longest = torch.full((1, 1, 8, 8), 0.1) if of == "linf" else torch.zeros(1, 1, 8, 8)
    longest[0, 0, 0, 0] = 0.1
    far = float(distance(longest.double(), torch.zeros_like(longest).double(), norm))
    assert far <= found * (1 + 1e-7)
    assert covering(make({"kind": "cw_l2"}), norm, 64) is None


def test_a_norm_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="give one of l2, linf"):
        replace(SETTINGS, norm="l3")
