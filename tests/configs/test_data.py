"""Every file of configs/data is a complete DataConfig and tells how to get its data."""

import yaml

from certizoo.shards import DataConfig
from tests.tools.config_files import files


def test_data_configs_are_complete() -> None:
    for path in files("data"):
        text = path.read_text()
        content = yaml.safe_load(text)
        assert DataConfig(**content).name == path.stem
        of_text = set() if content.get("kind") == "text" else {"kind", "tokenizer"}
        assert set(content) | of_text == set(DataConfig.__dataclass_fields__), path
        assert "certizoo shards" in text, path
    assert {path.stem for path in files("data")} >= {"digits", "cifar10", "mnist", "imagenet"}
