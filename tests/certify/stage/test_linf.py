"""The certify stage in Linf on real files: rows, certificate, page, card, tags, champion; never mixed with L2."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import zoo
from certify import certified_radius
from certify.__main__ import main
from certify.rows.draws import draws
from certify.stage import register, tables
from certify.stage import run as stage
from certizoo import UserError, shards
from certizoo.attacks import AttackConfig
from certizoo.config.compose import compose_config
from certizoo.registry import browse
from tests.tools.html_page import Page
from tests.tools.stage_runs import data

EPS = tuple(k / 255 for k in (1, 4, 128))
NAMES = [f"{eps:g}" for eps in EPS]
SETTINGS = stage.Settings(
    norm="linf", method="adjoint", images=30, eps=EPS, batch_size=15, attack=AttackConfig(norm="l2", steps=10),
    nonce="n1", served_dtype=None,
)  # fmt: skip


@pytest.fixture(scope="module")
def out(handover: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("linf") / "certificate"
    stage.run(handover, data(digits), SETTINGS, folder)
    return folder


@pytest.fixture
def summary(out: Path) -> dict[str, Any]:
    return json.loads((out / stage.CERTIFICATE).read_text())


def images_of(digits: Path) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    test = shards.find(data(digits), "test")
    keys, images, labels = next(iter(shards.eval_loader(test, data(digits), batch_size=30, limit=30)))
    return keys, images, labels


@pytest.mark.slow
def test_rows_are_of_linf_certificate_and_attack(
    out: Path, summary: dict[str, Any], handover: Path, digits: Path
) -> None:
    rows = pd.read_parquet(out / stage.TABLE)
    keys, images, labels = images_of(digits)
    model, _ = zoo.handover.load(handover)
    radius_B = certified_radius(model, images, labels, "adjoint", "n1", "linf")
    torch.testing.assert_close(torch.tensor(rows["radius.adjoint"]), radius_B, rtol=5e-3, atol=1e-12)
    for eps, name in zip(EPS, NAMES, strict=True):
        attack = AttackConfig(norm="linf", eps=eps, steps=10)
        with torch.no_grad():
            survives = model(attack.run(model, images, labels, draws(keys))).argmax(1) == labels
        assert rows[f"pgd.{name}"].tolist() == (survives & torch.tensor(rows["correct"])).tolist()
        certified = rows[f"certified.{name}"] == "certified"
        assert (certified == (rows["radius.adjoint"] >= eps)).all()
        assert (certified <= rows[f"pgd.{name}"]).all()
    assert summary["accuracy"][NAMES[0]]["certified"] > 0.3
    assert summary["accuracy"][NAMES[2]]["certified"] == 0


def test_every_part_of_the_result_says_its_norm(out: Path, summary: dict[str, Any]) -> None:
    subject = json.loads((out / "subject.json").read_text())
    assert subject["norm"] == summary["norm"] == summary["threat_model"]["norm"] == summary["attack"]["norm"] == "linf"
    page = (out / stage.REPORT).read_text()
    visible = "".join(Page(page).texts("main")).partition("certificate.json")[0]
    shown = [*Page(page).texts("text"), *Page(page).texts("title")]
    assert "Certified Linf robustness" in visible
    assert "Linf ball in [0,1] pixels" in visible
    assert "Linf radius eps in 1/255 of [0,1] pixel space" in shown
    assert "Linf radius in 1/255" in shown
    assert Page(page).texts("th", scope="row")[: len(EPS)] == ["1/255", "4/255", "128/255"]
    assert "certified, eps 1/255" in visible
    assert f"{255 * summary['median_radius']:.3f}/255" in visible
    card = (out / stage.CARD).read_text()
    assert "| Linf eps |" in card
    assert "| **1/255** |" in card
    assert "**Threat model.** Linf ball in" in card
    for text in (visible.replace("that of the L2 ball around", ""), card):
        assert "L2" not in text
    table = tables.table(summary)
    assert table.columns[0].header == "Linf eps"
    assert list(table.columns[0].cells) == ["1/255", "4/255", "128/255"]


def test_the_command_on_the_page_asks_for_the_same_norm(out: Path) -> None:
    (shown,) = Page((out / stage.REPORT).read_text()).texts("pre", id="command")
    config = compose_config("certify", shlex.split(shown)[3:])
    assert config["norm"] == config["attack"]["norm"] == "linf"
    assert tuple(config["eps"]) == EPS
    assert config["headline_eps"] == EPS[0]


@pytest.mark.parametrize(("first", "second"), [("linf", "l2"), ("l2", "linf")])
def test_rows_of_another_norm_are_not_continued(
    first: str, second: str, handover: Path, digits: Path, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, method="lofast", norm=first, images=4, batch_size=4, eps=(0.01,), headline_eps=0.01)
    stage.run(handover, data(digits), settings, tmp_path)
    with pytest.raises(UserError, match="another norm"):
        stage.run(handover, data(digits), replace(settings, norm=second), tmp_path)


def test_tags_have_the_norm_in_their_names_and_champions_answer_one(
    out: Path, summary: dict[str, Any], handover: Path, digits: Path, tmp_path: Path, store_in: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store_in)
    said: dict[str, Any] = {"registered_name": "digits", "experiment": "test", "champion_images": 20}
    line = register.publish(handover, out, **said)
    assert line == "digits version 1 (champion)"
    tags = browse.find("digits/1").tags
    share = f"{summary['accuracy'][NAMES[0]]['certified']:.4f}"
    assert tags[f"certified_acc.linf.{NAMES[0]}"] == share
    assert float(tags[f"certified_low.linf.{NAMES[0]}"]) <= float(share)
    assert {f"pgd_acc.linf.{name}" for name in NAMES} <= set(tags)
    assert (tags["norm"], tags["headline"]) == ("linf", f"certified_acc.linf.{NAMES[0]}")
    assert not [tag for tag in tags if tag.startswith(("certified_acc.0", "pgd_acc.0", "certified_low.0"))]
    other = replace(SETTINGS, norm="l2", method="lofast", eps=(EPS[0],), headline_eps=EPS[0])
    stage.run(handover, data(digits), other, tmp_path / "l2")
    line = register.publish(handover, tmp_path / "l2", **said)
    assert "digits version 2 (not champion: its figures cannot be compared" in line
    assert "norm l2 instead of linf" in line
    assert f"certified_acc.{NAMES[0]}" in browse.find("digits/2").tags


def test_the_served_model_is_certified_in_linf(handover: Path, digits: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, images=6, batch_size=6, served_dtype="float32")
    summary = stage.run(handover, data(digits), settings, tmp_path)
    rows = pd.read_parquet(tmp_path / stage.TABLE)
    assert summary["numerics"]["rounding_of_the_served_model"] == "proved"
    _, images, labels = images_of(digits)
    model, _ = zoo.handover.load(handover)
    exact = certified_radius(model, images[:6], labels[:6], "adjoint", "n1", "linf")
    served = torch.tensor(rows["radius.adjoint"])
    assert (served <= exact * 1.01).all()
    assert (served >= 0.9 * exact).any()
    assert served.max() > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm": "l1"}, "give one of l2, linf"),
        ({"eps": (8.0,), "headline_eps": 8.0}, "8/255"),
        ({"eps": (0.02, 1.58), "headline_eps": 1.58}, "every image"),
        ({"headline_eps": 0.1}, "headline_eps=0.1 is not among"),
    ],
)
def test_what_is_no_radius_of_linf_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        replace(SETTINGS, **changes)
    assert "\n" not in str(refused.value)


def test_a_norm_has_radii_of_its_own_unless_others_are_given() -> None:
    assert stage.Settings(norm="linf").grid == (1 / 255, 2 / 255, 4 / 255, 8 / 255)
    assert stage.Settings().grid == (0.02, 0.05, 0.1, 36 / 255)
    assert stage.Settings(norm="linf").headline in stage.Settings(norm="linf").grid
    assert stage.Settings(norm="linf").attack_in_norm.norm == "linf"


def test_the_command_in_linf(handover: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([f"handover={handover}", f"out={tmp_path}", "images=4", "norm=linf", "method=lofast", "attack.steps=2"])
    assert "Linf eps" in capsys.readouterr().out
    assert json.loads((tmp_path / stage.CERTIFICATE).read_text())["eps"] == [k / 255 for k in (1, 2, 4, 8)]
    with pytest.raises(SystemExit):
        main([f"handover={handover}", f"out={tmp_path}", "norm=l7"])
    assert "give one of l2, linf" in capsys.readouterr().err
