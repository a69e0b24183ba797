"""An attack that cannot work on a model is refused by the command before an image is certified."""

from pathlib import Path
from typing import Any

import pytest

import zoo
from certify.__main__ import main
from certizoo import shards
from certizoo.config.compose import CONFIGS, compose_config
from certizoo.shards.writing import sources

MODEL: dict[str, Any] = {"name": "spec_vit_digits", "depth": 1, "embed_dim": 8, "num_classes": 2}


@pytest.fixture(scope="module")
def two_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the hand-over of an untrained model of zeros and ones, with their shards."""
    folder = tmp_path_factory.mktemp("run")
    split = [(image, label) for image, label in sources.digits()["test"] if label < 2][:8]
    shards.write(split, folder / "shards", name="digits", split="test")
    words = ["data=digits", f"data.root={folder}/shards", "data.num_classes=2"]
    data = compose_config("certify", words)["data"]
    zoo.handover.save(folder / "handover", zoo.create_model(**MODEL), MODEL, {"data": data})
    return folder / "handover"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluate", "protocol=nested", "images=4"], "protocol.attacks.autoattack: apgd-t needs 4 classes or more"),
        (["certify", "images=4", "attack.loss=dlr"], "attack.loss=dlr needs three classes or more"),
        (
            ["evaluate", "protocol=quick", "images=4", "+protocol.attacks.x={kind:pgd,loss:dlr}"],
            "protocol.attacks.x: attack.loss=dlr needs three",
        ),
    ],
)
def test_it_is_refused_before_work(
    words: list[str], said: str, two_classes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def worked(*_: object) -> None:
        raise AssertionError("an image was certified first")

    monkeypatch.setattr("certify.rows.runner.Run.complete", worked)
    with pytest.raises(SystemExit):
        main([*words, f"handover={two_classes}"])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((CONFIGS / "protocol").glob("nested*.yaml")), ids=lambda path: path.stem)
def test_the_suggested_attacks_are_a_key_that_works(
    path: Path, two_classes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", f"protocol={path.stem}", f"handover={two_classes}"])
    suggested = capsys.readouterr().err.split("set its ")[1].strip()
    assert suggested == "attacks=[apgd-ce,fab-t,square]"
    config = compose_config("evaluate", [f"protocol={path.stem}", f"protocol.attacks.autoattack.{suggested}"])
    assert config["protocol"]["attacks"]["autoattack"]["attacks"] == ["apgd-ce", "fab-t", "square"]
