"""The table of certified models in docs/results.md, from leaderboard/*.json: `python -m docs.results_table`."""

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


def markdown() -> str:
    """Return our and published models by certified accuracy at the headline radius, and which of them are sound."""
    found = sorted((e for e in entries() if e.text("dataset") == DATASET), key=lambda e: (-e.headline("l2"), e.name))
    heads = ("model", "clean", *(f"{NORMS[norm]} {eps_name(eps)}" for norm, eps in COLUMNS))
    rows = [(_name(e), _share(e, e.clean), *(_point(e, e.at(norm, eps)) for norm, eps in COLUMNS)) for e in found]
    notes = [f"- {code(e.name)}, {cell(e.text('title'))}. {cell(e.text('soundness'))}" for e in found]
    return "\n".join(["", table(heads, rows, right=heads[1:]), *notes, "", ""])


def _name(entry: Entry) -> str:
    return f"{code(entry.name)}, as published" if entry.published else f"**{code(entry.name)}**"


def _point(entry: Entry, there: Point | None) -> str:
    if there is None:
        return ""
    attacked = "" if there.attacked is None else f" / {there.attacked:.1f}"
    return f"{_share(entry, there.certified)}{attacked}"


def _share(entry: Entry, share: float | None) -> str:
    """Format our share with its interval; published ones are of whole test sets."""
    if share is None:
        return "-"
    return f"{share:.1f}" if entry.published else f"{share:.1f} ({interval(share / 100, int(entry.text('images')))})"


def main() -> None:
    """Write the table into the page."""
    PAGE.write_text(PLACE.sub(lambda _: markdown(), PAGE.read_text()))


if __name__ == "__main__":
    main()
