"""The leaderboard: every file of `leaderboard/` as a row of a table, and its curves as pictures.

Entries with our figures are separate from published ones, for which nothing was run here.
"""

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from certify.rows.intervals import NAMES as NORMS
from docs.generate.tables import cell, code, table

FOLDER = Path(__file__).resolve().parents[2] / "leaderboard"
FIGURES = "leaderboard"  # folder of the site
NONE = "There are no entries yet.\n"
COLOURS = ("#3949ab", "#d81b60", "#00897b", "#f4511e", "#6d4c41", "#7cb342", "#5e35b1", "#546e7a")
HEADLINE = {"l2": 36 / 255, "linf": 1 / 255}  # rows are sorted by what is certified at this radius
FRACTIONS = {n / 255: f"{n:g}/255" for n in (0.5, 1, 2, 4, 8, 16, 36, 72, 108)}


@dataclass(frozen=True)
class Point:
    """Shares of all images at one radius, in per cent; None if not measured."""

    eps: float
    certified: float | None
    attacked: float | None
    attack: str


@dataclass(frozen=True)
class Entry:
    """One file. Missing values are ''."""

    file: str
    said: Mapping[str, Any]

    def text(self, key: str) -> str:
        value = self.said.get(key)
        return "" if value is None else " ".join(str(value).split())

    @property
    def name(self) -> str:
        return self.text("name") or self.file

    @property
    def place(self) -> str:
        """Return a name without special meaning in a path or link."""
        return f"entry-{_simple(self.file)}"

    @property
    def published(self) -> bool:
        """Return True if the figures are taken from a publication."""
        return bool(self.said.get("published"))

    @property
    def clean(self) -> float | None:
        """Return the clean accuracy in per cent."""
        return _number(self.said.get("clean"))

    def at(self, norm: str, eps: float) -> Point | None:
        """Return the entry's point at this radius."""
        return next((point for point in self.curve(norm) if abs(point.eps - eps) < 5e-5), None)

    def headline(self, norm: str) -> float:
        """Return what is certified at HEADLINE; -1 if unknown."""
        there = self.at(norm, HEADLINE[norm])
        return -1.0 if there is None or there.certified is None else there.certified

    def curve(self, norm: str) -> list[Point]:
        """Return the points by growing radius."""
        found = self.said.get("curves") or {}
        points = [
            Point(
                float(f"{float(eps):.5g}"),
                _number(at.get("certified")),
                _number(at.get("attacked")),
                str(at.get("attack") or ""),
            )
            for eps, at in (found.get(norm) or {}).items()
        ]
        return sorted(points, key=lambda point: point.eps)


def markdown() -> str:
    """Return tables, pictures and the background of each entry."""
    found = entries()
    if not found:
        return NONE
    ours, theirs = [e for e in found if not e.published], [e for e in found if e.published]
    parts = [_boards(ours) if ours else NONE]
    if theirs:
        parts += ["## Published elsewhere\n", PUBLISHED, _boards(theirs, level=3)]
    return "\n".join([*parts, "## What stands behind each entry\n", *map(_details, found)])


PUBLISHED = """\
Figures as their authors printed them, for comparison. None of these models was run here, and no certificate of theirs
was checked: read the note on soundness of each below.
"""


def figures() -> dict[str, str]:
    """Return pictures by their path in the site."""
    found = {f"{FIGURES}/{entry.place}.svg": picture([entry]) for entry in entries() if _has_curve(entry)}
    for (dataset, norm), board in _by_question([entry for entry in entries() if not entry.published]).items():
        found[f"{FIGURES}/{_board_name(dataset, norm)}.svg"] = picture(board, norm)
    return found


@cache
def entries(folder: Path = FOLDER) -> tuple[Entry, ...]:
    """Return every file of the folder but its schema; nothing if the folder does not exist."""
    paths = [path for path in sorted(folder.glob("*.json")) if path.stem != "schema"]
    return tuple(Entry(path.stem, json.loads(path.read_text())) for path in paths)


def eps_name(eps: float) -> str:
    """Format 0.1411764705882353 as '36/255'."""
    near = [name for value, name in FRACTIONS.items() if abs(eps - value) < 5e-5]
    return near[0] if near else f"{eps:g}"


def _boards(found: Sequence[Entry], level: int = 2) -> str:
    return "\n".join(_board(dataset, norm, board, level) for (dataset, norm), board in _by_question(found).items())


def _by_question(found: Iterable[Entry]) -> dict[tuple[str, str], list[Entry]]:
    """Return (data set, norm) -> its entries, best first."""
    boards: dict[tuple[str, str], list[Entry]] = {}
    for entry in found:
        for norm in NORMS:
            if entry.curve(norm):
                boards.setdefault((entry.text("dataset"), norm), []).append(entry)
    return {key: sorted(board, key=lambda entry: _rank(entry, key[1])) for key, board in sorted(boards.items())}


def _rank(entry: Entry, norm: str) -> tuple[float, str]:
    """Return the sort key: by certified accuracy at the headline radius, unknown last."""
    return -entry.headline(norm), entry.name


def _board(dataset: str, norm: str, board: Sequence[Entry], level: int) -> str:
    radii = sorted({point.eps for entry in board for point in entry.curve(norm)})
    shown = [eps_name(eps) for eps in radii]
    rows = [(f"[{code(e.name)}](#{e.place})", *_figures(e, norm, radii), cell(e.text("title"))) for e in board]
    columns = ("model", "images", "clean", *shown, "what it is")
    text = f"{'#' * level} {cell(dataset)}, {NORMS[norm]}\n\n" + table(columns, rows, right=columns[1:-1])
    if board[0].published:
        return text
    name = f"{FIGURES}/{_board_name(dataset, norm)}.svg"
    caption = f"certified accuracy on {cell(dataset)}, {NORMS[norm]}"
    return f"{text}\n![{caption}]({name}){{.curve}}\n\n[The picture as a file]({name}){{download}}\n"


def _figures(entry: Entry, norm: str, radii: Sequence[float]) -> list[str]:
    """Return images, clean accuracy, and 'certified / attacked' at each radius."""
    points = {point.eps: point for point in entry.curve(norm)}
    found = [points.get(eps, Point(eps, None, None, "")) for eps in radii]
    pairs = [(_share(p.certified), _share(p.attacked)) for p in found]
    shown = ["-" if pair == ("-", "-") else f"**{pair[0]}**&nbsp;/&nbsp;{pair[1]}" for pair in pairs]
    return [_plain(entry, "images"), _plain(entry, "clean"), *shown]


def _function(served_dtype: str) -> str:
    """Describe the certified function; entries of earlier code, which knew only one, do not state it."""
    if served_dtype:
        return f"the model as served in {served_dtype}, rounding included"
    return "the float64 function of the served weights"


def _details(entry: Entry) -> str:
    attacks = sorted({point.attack for norm in NORMS for point in entry.curve(norm) if point.attack})
    extra = {"True": "yes", "False": "no"}.get(entry.text("extra_data"), "")
    lines = {
        "published": cell("as published, not run here") if entry.published else "",
        "method": cell(entry.text("method")),
        "certified": "" if entry.published else cell(_function(entry.text("served_dtype"))),
        "numerics": cell(entry.text("numerics")),
        "attacks": cell(", ".join(attacks)),
        "training": cell(entry.text("training")),
        "extra data": extra,
        "parameters": f"{int(entry.said['parameters']):,}" if entry.said.get("parameters") else "",
        "soundness": cell(entry.text("soundness")),
        "source": _source(entry.text("source")),
        "weights, sha256": code(entry.text("weights_sha256")),
        "command": code(entry.text("command")),
    }
    rows = [(key, value) for key, value in lines.items() if value]
    picture_of = f"\n[Its curves as a file]({FIGURES}/{entry.place}.svg){{download}}\n" if _has_curve(entry) else ""
    head = f"### {code(entry.name)} {{#{entry.place}}}\n\n{cell(entry.text('title'))}\n\n"
    return head + table(("", ""), rows) + picture_of


def picture(found: Sequence[Entry], norm: str | None = None) -> str:
    """Draw certified (line) and attacked (dots) accuracy over the radius, as reproducible SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(
        {"svg.hashsalt": "certizoo", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        lines = [(entry, key) for entry in found for key in NORMS if key == (norm or key) and entry.curve(key)]
        for (entry, key), colour in zip(lines, COLOURS * (1 + len(lines) // len(COLOURS)), strict=False):
            _draw(axes, entry, key, colour, name=entry.name if norm else NORMS[key])
        axes.set(xlabel="eps, in [0,1] pixels", ylabel="% of the images", ylim=(0, None), xlim=(0, None))
        axes.set_title(f"{found[0].text('dataset')}, {NORMS[norm]}" if norm else found[0].name)
        axes.legend(frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": "CertiZoo"})
        pyplot.close(figure)
    return out.getvalue()


def _draw(axes: Any, entry: Entry, norm: str, colour: str, name: str) -> None:
    points = entry.curve(norm)
    start = [] if entry.clean is None else [(0.0, entry.clean)]
    certified = start + [(p.eps, p.certified) for p in points if p.certified is not None]
    attacked = [(p.eps, p.attacked) for p in points if p.attacked is not None]
    axes.plot(
        *zip(*certified, strict=True), color=colour, marker="o", ms=3, label=f"{name}: certified"
    ) if certified else None
    if attacked:
        axes.plot(*zip(*attacked, strict=True), color=colour, ls=":", marker="x", ms=5, label=f"{name}: attacked")


def _has_curve(entry: Entry) -> bool:
    return any(entry.curve(norm) for norm in NORMS)


def _board_name(dataset: str, norm: str) -> str:
    return f"board-{_simple(dataset.lower())}-{norm}"


def _simple(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text)


def _source(text: str) -> str:
    """Return a link if the text is one."""
    return f"<{text}>" if re.fullmatch(r"https?://[^\s<>\"'`]+", text) else cell(text)


def _plain(entry: Entry, key: str) -> str:
    value = _number(entry.said.get(key))
    return "-" if value is None else f"{value:g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
