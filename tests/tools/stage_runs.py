"""A small model of the digits, the digits, and settings for quick runs of the certify stage."""

from pathlib import Path
from typing import Any

from certify.rows import records
from certify.stage import run as stage
from certizoo.attacks import AttackConfig
from certizoo.shards import DataConfig

CONFIG: dict[str, Any] = {"name": "spec_vit_digits", "num_classes": 10, "img_size": 8, "in_chans": 1}
SETTINGS = stage.Settings(
    method="lofast",
    images=60,
    eps=(0.01, 0.1, 5.0),
    batch_size=20,
    attack=AttackConfig(norm="l2", steps=10, loss="margin"),
)
SUBJECT: dict[str, Any] = dict.fromkeys(records.KEYS, "x") | {"first": 0, "images": 1}


def data(root: Path) -> DataConfig:
    """Return the digits in `root`."""
    return DataConfig("digits", str(root), "digits-train-*.tar", "digits-test-*.tar", 10, 8, 1)
