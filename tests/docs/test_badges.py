"""Badges agree with the project's files, and README shows each of them."""

from xml.etree import ElementTree

import pytest

from docs import badges
from tests.tools.launching import ROOT


@pytest.mark.parametrize("name", sorted(badges.badges()))
def test_a_badge_is_what_the_files_say(name: str) -> None:
    svg = (badges.FOLDER / f"{name}.svg").read_text()
    assert svg == badges.badges()[name], "python -m docs.badges"
    assert f"docs/badges/{name}.svg" in (ROOT / "README.md").read_text()
    assert ElementTree.fromstring(svg).tag.endswith("svg")


def test_there_are_no_others() -> None:
    assert {path.stem for path in badges.FOLDER.iterdir()} == set(badges.badges())
