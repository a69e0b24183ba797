"""`python -m certify` has eight commands, and none imports what only another command, or only its end, needs."""

import re

import pytest

from certify.__main__ import COMMANDS
from certizoo.config.compose import CONFIGS, compose_config


def keys_below(name: str, group: str) -> bool:
    """Return True if the file of a command has keys or a group of this name."""
    return re.search(rf"^(  - )?{group}:", (CONFIGS / f"{name}.yaml").read_text(), re.M) is not None


def test_every_command_has_a_configuration_of_its_name() -> None:
    assert all((CONFIGS / f"{name}.yaml").is_file() for name in COMMANDS)


@pytest.mark.parametrize("name", [name for name in COMMANDS if keys_below(name, "data")])
def test_every_command_that_reads_shards_takes_data_by_name(name: str) -> None:
    assert compose_config(name, ["data=cifar10", "data.root=here"])["data"]["root"] == "here"
