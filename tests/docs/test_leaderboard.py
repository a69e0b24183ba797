"""The leaderboard's page, for any entries: ours and published apart, best first, and foreign text as text."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from markdown import markdown

from docs.generate import leaderboard
from docs.generate.leaderboard import Entry

FULL: dict[str, Any] = {
    "name": "mine", "title": "A small ViT", "dataset": "cifar10", "images": 1000, "clean": 61.0, "method": "best",
    "curves": {
        "l2": {
            "0.1": {"certified": 54.5, "attacked": 55.1, "attack": "PGD-100"},
            "0.1411764705882353": {"certified": 51.9, "attacked": 52.6, "attack": "PGD-100"},
        },
        "linf": {"0.00392157": {"certified": 49.4, "attacked": 51.1, "attack": "PGD-100"}},
    },
    "numerics": "float64", "extra_data": False, "parameters": 284734, "training": "105 minutes of one core",
    "weights_sha256": "ab" * 32, "command": "python -m certify handover=X", "source": None, "published": False,
    "soundness": "proved",
}  # fmt: skip
THEIRS: dict[str, Any] = {
    "name": "theirs", "title": "Of a paper", "dataset": "cifar10", "images": 10000, "clean": None, "published": True,
    "curves": {"l2": {"0.141176": {"certified": 73.2, "attacked": None, "attack": None}}},
    "source": "https://arxiv.org/abs/2601.18513", "soundness": "rounding is not counted",
}  # fmt: skip
EXTENSIONS = ["tables", "attr_list", "md_in_html"]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the page of some entries."""

    def of(*said: dict[str, Any]) -> str:
        found = tuple(Entry(entry.get("name", f"e{i}"), entry) for i, entry in enumerate(said))
        monkeypatch.setattr(leaderboard, "entries", lambda: found)
        return leaderboard.markdown()

    return of


def test_no_folder_is_no_entries(tmp_path: Path, page: Any) -> None:
    assert leaderboard.entries(tmp_path / "none") == ()
    assert page() == leaderboard.NONE


def test_files_are_read_but_for_the_schema(tmp_path: Path) -> None:
    for name in ("mine", "schema"):
        (tmp_path / f"{name}.json").write_text(json.dumps(FULL))
    assert [entry.file for entry in leaderboard.entries(tmp_path)] == ["mine"]


def test_ours_and_published_ones_are_apart(page: Any) -> None:
    ours, _, theirs = page(THEIRS, FULL).partition("## Published elsewhere")
    board, _, details = theirs.partition("## What stands behind")
    assert "mine" in ours
    assert "theirs" not in ours
    assert "**73.2**&nbsp;/&nbsp;-" in board
    assert "None of these models was run here" in board
    for words in (
        "rounding is not counted",
        "<https://arxiv.org/abs/2601.18513>",
        "as published, not run here",
        "284,734",
    ):
        assert words in details


def test_radii_of_two_spellings_are_one_column_and_the_best_comes_first(page: Any) -> None:
    better = FULL | {
        "name": "better",
        "curves": {"l2": {"0.141176": {"certified": 60.0, "attacked": None, "attack": ""}}},
    }
    lines = page(FULL, better).splitlines()
    assert "| model | images | clean | 0.1 | 36/255 | what it is |" in lines
    rows = [line for line in lines if line.startswith("| [")]
    assert rows[0].startswith("| [`better`](#entry-better) | 1000 | 61 | - | **60.0**&nbsp;/&nbsp;- |")
    assert "| model | images | clean | 1/255 | what it is |" in lines


def test_an_entry_may_say_little(page: Any) -> None:
    assert "### `e0` {#entry-e0}" in page({"dataset": "digits"})
    assert page({"curves": {"l2": {"0.1": {}}}, "dataset": "digits"}).count("| - | - | - |") == 1


def test_text_of_others_stays_text(page: Any) -> None:
    """Foreign text adds no tag, attribute, link or picture, and a table keeps its columns."""
    evil = "<script>x()</script> | {onclick=x() .y} [a](javascript:x) ![b](http://c/d.png) &lt;b&gt; `|`\n\n# H"
    said = FULL | dict.fromkeys(("title", "dataset", "method", "numerics", "training", "soundness", "command"), evil)
    html = markdown(page(said | {"source": "javascript://x", "name": "a|b`c<i>"}), extensions=EXTENSIONS)
    for tag in ("<script", "<i>", "<b>", 'javascript:x"', 'onclick="', 'd.png"', "<h1"):
        assert tag not in html, tag
    for table in re.findall(r"<table>.*?</table>", html, re.S):
        cells = {len(re.findall(r"<t[hd]\b", row)) for row in re.findall(r"<tr>.*?</tr>", table, re.S)}
        assert len(cells) == 1, table


def test_pictures_are_the_same_whenever_they_are_made() -> None:
    entries = [Entry("mine", FULL), Entry("theirs", THEIRS)]
    first, again = leaderboard.picture(entries, "l2"), leaderboard.picture(entries, "l2")
    assert first == again
    assert ElementTree.fromstring(first).tag.endswith("svg")


@pytest.mark.parametrize(("eps", "name"), [(0.1, "0.1"), (36 / 255, "36/255"), (0.00392157, "1/255"), (0.25, "0.25")])
def test_radii_have_their_usual_names(eps: float, name: str) -> None:
    assert leaderboard.eps_name(eps) == name
