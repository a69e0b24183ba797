"""The leaderboard's page, for any entries: one ranking a question, the best first, and foreign text as text."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from markdown import markdown

import zoo
from docs.generate import board_chart, board_table, leaderboard
from docs.generate.entries import Entry, entries, eps_name, questions

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
    "soundness": "proved", "year": 2026, "paper": None, "attention": "dot product", "sound": "exact",
}  # fmt: skip
THEIRS: dict[str, Any] = {
    "name": "theirs", "title": "Of a paper", "dataset": "cifar10", "images": 10000, "clean": None, "published": True,
    "curves": {"l2": {"0.141176": {"certified": 73.2, "attacked": None, "attack": None}}}, "sound": "norms estimated",
    "source": "https://arxiv.org/abs/2601.18513", "soundness": "rounding is not counted", "paper": "Them, 2026",
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


def rows(text: str) -> list[dict[str, str]]:
    """Return label -> text of the cells of each row of the rankings."""
    found = []
    for row in re.findall(r"<tr[^>]*>(.*?)</tr>", text, re.S):
        cells = re.findall(r'<td[^>]*data-label="([^"]*)"[^>]*>(.*?)</td>', row, re.S)
        found += [{label: re.sub(r"<[^>]*>", "", cell) for label, cell in cells}] if cells else []
    return found


def test_no_folder_is_no_entries(tmp_path: Path, page: Any) -> None:
    assert entries(tmp_path / "none") == ()
    assert page() == leaderboard.NONE


def test_files_are_read_but_for_the_schema(tmp_path: Path) -> None:
    for name in ("mine", "schema"):
        (tmp_path / f"{name}.json").write_text(json.dumps(FULL))
    assert [entry.file for entry in entries(tmp_path)] == ["mine"]


def test_ours_and_published_ones_are_ranked_together(page: Any) -> None:
    text = page(FULL, THEIRS)
    theirs, ours, linf = rows(text)
    assert (theirs["rank"], theirs["model"], theirs["36/255"], theirs["0.1"]) == ("1", "theirs", "73.2", "-")
    assert (ours["rank"], ours["model"], ours["36/255"]) == ("2", "mine", "51.9 / 52.6")
    assert (theirs["paper"], theirs["attention"], theirs["verified here"]) == ("Them, 2026", "no", "no")
    assert theirs["sound"] == "norms estimatedrounding is not counted"
    assert (ours["attention"], ours["verified here"]) == ("dot product", "yespython -m certify handover=X")
    assert linf["1/255"] == "49.4 / 51.1"
    assert 'href="https://arxiv.org/abs/2601.18513"' in text
    assert all(f"| {words} |" in text for words in ("as published, not run here", "284,734"))


def test_a_row_says_what_the_filters_ask(page: Any) -> None:
    marks = re.findall(r'<tr data-attention="(\w+)" data-sound="(\w+)"', page(FULL, THEIRS))
    assert marks[:2] == [("no", "no"), ("yes", "yes")]


def test_every_committed_entry_is_in_each_of_its_rankings() -> None:
    text = leaderboard.markdown()
    for question in questions(entries()):
        names = [row["model"] for row in rows(board_table.html(question))]
        assert names == [entry.name for entry in question.entries]
        certified = [entry.certified(question.norm, question.headline) for entry in question.entries]
        assert certified == sorted(certified, reverse=True)
        assert f'data-dataset="{question.dataset}" data-norm="{question.norm}"' in text
    assert {question.dataset for question in questions(entries())} >= {"cifar10", "cifar100", "imagenet", "mnist"}


def test_ours_name_a_command_that_checks_them() -> None:
    for entry in entries():
        if not entry.published:
            assert board_table.command(entry).startswith("python -m certify ")
    served = next(entry for entry in entries() if entry.name == "cert_vit_c10_float32")
    assert board_table.command(served) == (
        "python -m certify check leaderboard/cert_vit_c10_float32.json model=cert_vit_c10 data.root=SHARDS"
    )


def test_ours_load_by_name() -> None:
    published = {entry.sha256 for entry in zoo.weights.entries().values()}
    own = {entry.name: entry.said["weights_sha256"] for entry in entries() if not entry.published}
    assert len(set(own.values())) >= 8
    assert {name for name, digest in own.items() if digest not in published} == set()


def test_an_entry_may_say_little(page: Any) -> None:
    assert "### `e0` {#entry-e0}" in page({"dataset": "digits", "curves": {"l2": {"0.1": {}}}})


def test_text_of_others_stays_text(page: Any) -> None:
    """Foreign text adds no tag, attribute, link or picture, and a table keeps its columns."""
    evil = "<script>x()</script> | {onclick=x() .y} [a](javascript:x) ![b](http://c/d.png) &lt;b&gt; `|`\n\n# H"
    foreign = {key for key, value in FULL.items() if isinstance(value, str)} - {"weights_sha256", "name"}
    said = FULL | dict.fromkeys([*foreign, "paper"], evil)
    html = markdown(page(said | {"source": "javascript://x", "name": "a|b`c<i>"}), extensions=EXTENSIONS)
    for tag in ("<script", "<i>", "<b>x", 'javascript:x"', 'onclick="', 'd.png"', "<h1"):
        assert tag not in html, tag
    for table in re.findall(r"<table[^>]*>.*?</table>", html, re.S):
        cells = {len(re.findall(r"<t[hd]\b", row)) for row in re.findall(r"<tr[^>]*>.*?</tr>", table, re.S)}
        assert len(cells) == 1, table


def test_a_chart_names_its_lines_below_it_and_takes_the_colours_of_the_page() -> None:
    (question, *_) = questions(entries())
    chart = ElementTree.fromstring(board_chart.html(question))
    shown = board_chart.chosen(question)
    assert {entry.published for entry in shown} == {False, True}
    svg, legend, _ = chart
    assert len(svg.findall("polyline")) == len(legend) == len(shown)
    assert not [part for part in svg.iter() if {"fill", "stroke", "style"} & set(part.attrib)]


def test_the_files_hold_every_point() -> None:
    made = leaderboard.files()
    assert len(json.loads(made["leaderboard/entries.json"])) == len(entries())
    points = list(csv.DictReader(io.StringIO(made["leaderboard/points.csv"])))
    assert len(points) == sum(len(entry.curve(norm)) for entry in entries() for norm in ("l2", "linf"))


@pytest.mark.parametrize(("eps", "name"), [(0.1, "0.1"), (36 / 255, "36/255"), (0.00392157, "1/255"), (0.25, "0.25")])
def test_radii_have_their_usual_names(eps: float, name: str) -> None:
    assert eps_name(eps) == name
