"""Every file of configs/data is a complete DataConfig and tells how to get its data."""

from pathlib import Path

import pytest
import yaml

from certizoo.shards import DataConfig

FILES = sorted((Path(__file__).resolve().parents[2] / "configs" / "data").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_data_configs_are_complete(path: Path) -> None:
    text = path.read_text()
    content = yaml.safe_load(text)
    assert DataConfig(**content).name == path.stem
    assert set(content) == set(DataConfig.__dataclass_fields__)
    assert "certizoo shards" in text


def test_the_four_sets_are_there() -> None:
    assert {path.stem for path in FILES} >= {"digits", "cifar10", "mnist", "imagenet"}
