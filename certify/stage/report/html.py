"""HTML and SVG as trees: text and attributes are escaped when they are written, so that data cannot become markup."""

from typing import Any
from xml.etree import ElementTree

Element = ElementTree.Element
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # no scripts, no external resources


def el(tag: str, *children: Element | str, **attributes: Any) -> Element:
    """Return <tag attributes>children</tag>; `class_` means class, '_' becomes '-', and None omits an attribute."""
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    made = Element(
        tag, {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in given.items()}
    )
    for child in children:
        if isinstance(child, str):
            _add_text(made, child)
        else:
            made.append(child)
    return made


def _add_text(parent: Element, text: str) -> None:
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text


def data(text: object) -> Element:
    """Return text that comes from data, isolated from the reading direction of its surroundings."""
    return el("bdi", str(text))


def table(caption: str, head: list[str], rows: list[list[Element | str]]) -> Element:
    """Return a table whose first column names the rows."""
    return el(
        "div",
        el(
            "table",
            el("caption", caption),
            el("thead", el("tr", *(el("th", name, scope="col") for name in head))),
            el(
                "tbody",
                *(el("tr", el("th", row[0], scope="row"), *(el("td", cell) for cell in row[1:])) for row in rows),
            ),
        ),
        class_="wide",
    )


def document(title: str, style: str, *body: Element) -> str:
    """Return a whole page that loads nothing."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("style", style),
    )
    page = el("html", head, el("body", el("main", *body)), lang="en")
    return "<!doctype html>\n" + ElementTree.tostring(page, encoding="unicode", method="html") + "\n"
