"""`--help` of every command lists each of its keys with the default, the allowed values and the meaning."""

import pytest

import certify.__main__ as certify
from certizoo.config.compose import defaults_of
from certizoo.config.schema import words_of
from tests.tools.config_sections import SECTIONS
from trainers import entry


def shown(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command prints."""
    if name in certify.COMMANDS:
        certify.main([name, "--help"])
    else:
        entry.main(name, ["--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", SECTIONS)
def test_help_lists_every_key(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(name, capsys)
    allowed = words_of(SECTIONS[name])
    lines = said.splitlines()
    for key, default in defaults_of(name).items():
        at = lines.index(f"  {key}={default}")
        if key in allowed:
            assert allowed[key].split()[0] in lines[at + 1]


def test_help_has_the_comments_of_files_and_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert "to reproduce a result, give its nonce" in " ".join(shown("certify", capsys).split())  # certify/stage.yaml
    assert "images per optimiser step" in shown("std_train", capsys)  # adv_train.yaml, which it continues
    assert "  optimizer=adamw|muon|sgd" in shown("constrain", capsys)
    assert "  protocol=" in shown("evaluate", capsys)
