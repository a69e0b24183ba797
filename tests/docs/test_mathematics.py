"""Formulas in Markdown read the same on GitHub, which parses Markdown first, and on the site, which does not."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
DISPLAY = re.compile(r"^\$\$\n(.*?)\n\$\$$", re.M | re.S)
INLINE = re.compile(r"\$([^$]+)\$")
# Markdown removes the backslash, or opens emphasis.
TAKEN = {
    "an escape": re.compile(r"\\[^A-Za-z\n]"),
    "an underscore that opens emphasis": re.compile(r"(?<![A-Za-z0-9])_"),
    "an asterisk or tilde": re.compile(r"[*~]"),
}
BLOCK = re.compile(r"^ {0,3}(?:[-+=#>]|\d+[.)])(?:\s|$)", re.M)  # starts a list, a heading or a quotation


def formulas(text: str) -> list[str]:
    without = re.sub(r"`[^`\n]*`", "", DISPLAY.sub("", text))
    assert without.count("$") % 2 == 0, "a dollar sign has no partner"
    return DISPLAY.findall(text) + INLINE.findall(without)


@pytest.mark.parametrize("name", ["proofs.md", "references.md"])
def test_markdown_leaves_formulas_alone(name: str) -> None:
    found = formulas((DOCS / name).read_text())
    assert found
    for formula in found:
        for what, taken in TAKEN.items():
            assert not taken.search(formula), f"{what} in {formula}"
        assert formula == formula.strip()
        assert formula.count("{") == formula.count("}")


@pytest.mark.parametrize("name", ["proofs.md", "references.md"])
def test_lines_of_displays_begin_no_list_or_heading(name: str) -> None:
    for formula in DISPLAY.findall((DOCS / name).read_text()):
        assert not BLOCK.search(formula), formula


@pytest.mark.parametrize("name", ["proofs.md", "references.md"])
def test_formulas_of_a_line_stay_on_it(name: str) -> None:
    text = re.sub(r"`[^`\n]*`", "", DISPLAY.sub("", (DOCS / name).read_text()))
    assert not [formula for formula in INLINE.findall(text) if "\n" in formula]
