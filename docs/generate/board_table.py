"""The table of one question of the leaderboard, as HTML: ours and published entries in one ranking.

Each cell names its column (`data-label`), so that a phone shows a row as a card. Reasons and commands are folded.
"""

from xml.etree import ElementTree

import zoo
from certify.stage.report.html import Element, el
from docs.generate.entries import Entry, Point, Question, eps_name, share

NUMBERS = {"rank", "clean", "images", "year"}


def html(question: Question) -> str:
    """Return the table. Foreign text is escaped, for HTML and for Markdown."""
    rows = [_cells(rank, entry, question) for rank, entry in enumerate(question.entries, start=1)]
    labels = list(rows[0])
    numbers = NUMBERS | set(map(eps_name, question.radii))
    head = el("tr", *(el("th", label, class_="number" if label in numbers else None) for label in labels))
    body = [_row(entry, cells, numbers) for entry, cells in zip(question.entries, rows, strict=True)]
    return as_text(el("div", el("table", el("thead", head), el("tbody", *body), class_="ranking"), class_="sortable"))


def as_text(element: Element) -> str:
    """Return the HTML, without characters that a step for Markdown would read."""
    text = ElementTree.tostring(element, encoding="unicode", short_empty_elements=False)
    return text.replace("[", "&#91;").replace("\n", " ")


def command(entry: Entry) -> str:
    """Return the command that rechecks an entry of ours, or makes it again where its weights have no name."""
    digest, form = entry.text("weights_sha256"), "" if entry.text("served_dtype") else " served_dtype=null"
    for name, weights in zoo.weights.entries().items():
        if weights.sha256 == digest:
            named = "" if name == entry.name else f" model={name}"
            return f"python -m certify check leaderboard/{entry.file}.json{named} data.root=SHARDS{form}"
    return entry.text("command")


def _row(entry: Entry, cells: dict[str, Element | str], numbers: set[str]) -> Element:
    said = {
        "data_attention": "yes" if entry.text("attention") else "no",
        "data_sound": "no" if entry.text("sound") in ("no", "norms estimated", "unknown") else "yes",
        "class_": None if entry.published else "ours",
    }
    return el(
        "tr",
        *(
            el("td", cell, data_label=label, class_="number" if label in numbers else None)
            for label, cell in cells.items()
        ),
        **said,
    )


def _cells(rank: int, entry: Entry, question: Question) -> dict[str, Element | str]:
    """Return label -> cell."""
    extra = {"True": "yes", "False": "no"}.get(entry.text("extra_data"), "-")
    return {
        "rank": str(rank),
        "model": el("a", el("code", entry.name), href=f"#{entry.place}"),
        "clean": share(entry.clean),
        **{eps_name(eps): _shares(entry.at(question.norm, eps)) for eps in question.radii},
        "images": entry.text("images") or "-",
        "year": entry.text("year") or "-",
        "paper": _paper(entry),
        "generated data": extra,
        "attention": entry.text("attention") or "no",
        "sound": _folded(entry.text("sound") or "-", entry.text("soundness")),
        "verified here": "no" if entry.published else _folded("yes", el("code", command(entry))),
    }


def _shares(point: Point | None) -> Element | str:
    """Return 'certified / attacked'."""
    if point is None or (point.certified is None and point.attacked is None):
        return "-"
    attacked = "" if point.attacked is None else f" / {point.attacked:.1f}"
    return el("span", el("b", share(point.certified)), attacked)


def _paper(entry: Entry) -> Element | str:
    words, source = entry.text("paper"), entry.text("source")
    if not source.startswith("https://"):
        return words or "this project"
    return el("a", words or "source", href=source)


def _folded(word: str, text: Element | str) -> Element | str:
    return el("details", el("summary", word), text) if text != "" else word
