"""The table of certified models in docs/results.md, made of leaderboard/*.json: `python -m docs.results_table`."""

import re
from pathlib import Path

from certify.rows.intervals import interval
from docs.generate.leaderboard import NORMS, Entry, Point, entries, eps_name
from docs.generate.tables import cell, code, table

PAGE = Path(__file__).parent / "results.md"
PLACE = re.compile(r"(?<=<!-- made by python -m docs\.results_table -->\n).*?(?=<!-- end of it -->)", re.S)
DATASET = "cifar10"
RADII = {"l2": (0.1, 36 / 255, 72 / 255, 108 / 255), "linf": (1 / 255, 2 / 255)}
COLUMNS = tuple((norm, eps) for norm, radii in RADII.items() for eps in radii)
HEADLINE = ("l2", 36 / 255)


def markdown() -> str:
    """Ours and published ones, by what is certified at the headline radius; below it, which of them are sound."""
    found = sorted((e for e in entries() if e.text("dataset") == DATASET), key=lambda e: (-certified(e), e.name))
    heads = ("model", "clean", *(f"{NORMS[norm]} {eps_name(eps)}" for norm, eps in COLUMNS))
    rows = [(_name(e), _share(e, _clean(e)), *(_point(e, point(e, norm, eps)) for norm, eps in COLUMNS)) for e in found]
    notes = [f"- {code(e.name)}, {cell(e.text('title'))}. {cell(e.text('soundness'))}" for e in found]
    return "\n".join(["", table(heads, rows, right=heads[1:]), *notes, "", ""])


def certified(entry: Entry) -> float:
    """At the headline radius; -1 where nobody says."""
    there = point(entry, *HEADLINE)
    return -1.0 if there is None or there.certified is None else there.certified


def point(entry: Entry, norm: str, eps: float) -> Point | None:
    """What the entry says there."""
    near = [there for there in entry.curve(norm) if abs(there.eps - eps) < 5e-5]
    return near[0] if near else None


def _name(entry: Entry) -> str:
    return f"{code(entry.name)}, as published" if entry.published else f"**{code(entry.name)}**"


def _clean(entry: Entry) -> float | None:
    clean = entry.said.get("clean")
    return None if clean is None else float(clean)


def _point(entry: Entry, there: Point | None) -> str:
    if there is None:
        return ""
    attacked = "" if there.attacked is None else f" / {there.attacked:.1f}"
    return f"{_share(entry, there.certified)}{attacked}"


def _share(entry: Entry, share: float | None) -> str:
    """Of ours with its interval: theirs are of whole test sets."""
    if share is None:
        return "-"
    return f"{share:.1f}" if entry.published else f"{share:.1f} ({interval(share / 100, int(entry.text('images')))})"


def main() -> None:
    """Put it into the page."""
    PAGE.write_text(PLACE.sub(lambda _: markdown(), PAGE.read_text()))


if __name__ == "__main__":
    main()
