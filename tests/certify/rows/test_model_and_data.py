"""A model and data that do not fit are refused by every command, in one line that names the key to set."""

import logging
from pathlib import Path
from typing import Any

import pytest

import zoo
from certify.__main__ import main
from certify.rows import images
from certizoo import UserError, shards
from certizoo.config.compose import compose_config
from certizoo.shards import DataConfig, require_fit
from tests.tools.stage_runs import data

ROOT = Path(__file__).parents[3]
MODEL: dict[str, Any] = {"name": "spec_vit_digits", "depth": 1, "embed_dim": 8}
COMMANDS = [
    ["certify", "data=cifar10"],
    ["evaluate", "data=cifar10", "protocol=quick"],
    ["analyse", "data=cifar10"],
    ["features", "data=cifar10"],
    ["check", str(ROOT / "leaderboard" / "cert_vit_c10.json"), "data.root=elsewhere"],
]


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "handover"
    wrong = compose_config("certify", ["data=cifar10"])["data"]
    zoo.handover.save(folder, zoo.create_model(**MODEL), MODEL, {"data": wrong})
    return folder


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_every_command_refuses_images_of_another_size(
    words: list[str], untrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*words, f"handover={untrained}"])
    assert "data.img_size is 32, but spec_vit_digits takes 8. Set data.img_size=8." in capsys.readouterr().err
    assert list(untrained.parent.iterdir()) == [untrained]


def test_the_second_model_of_features_is_compared_too(
    untrained: Path, tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = MODEL | {"img_size": 16}
    zoo.handover.save(tmp_path / "other", zoo.create_model(**other), other, {})
    words = [f"handover={untrained}", f"against={tmp_path}/other", f"out={tmp_path}/out"]
    with pytest.raises(SystemExit):
        main(["features", *words, "data=digits", f"data.root={digits}"])
    assert "data.img_size is 8, but spec_vit_digits takes 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"img_size": 28}, "data.img_size is 8, but m takes 28. Set data.img_size=28."),
        ({"in_chans": 3}, "data.channels is 1, but m takes 3. Set data.channels=3."),
        ({"num_classes": 1000}, "data.num_classes is 10, but m has 1000 classes."),
    ],
)
def test_size_channels_and_classes_are_compared(options: dict[str, int], said: str) -> None:
    config = DataConfig("digits", "digits", "train-*.tar", "test-*.tar", 10, 8, 1)
    require_fit(config, {"name": "m", "img_size": 8, "in_chans": 1, "num_classes": 10})
    with pytest.raises(UserError) as refused:
        require_fit(config, {"name": "m", "img_size": 8, "in_chans": 1, "num_classes": 10} | options)
    assert str(refused.value).startswith(said)


def test_a_test_set_of_few_of_the_classes_is_warned_of(
    tmp_path: Path, digits: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = data(digits)
    with caplog.at_level(logging.WARNING):
        images.image_list(config, 20, 10)
        assert not caplog.records
        images.image_list(shards.config_of(vars(config) | {"num_classes": 1000}, "the test"), 20, 10)
    assert "10 of 1000 classes" in caplog.text
