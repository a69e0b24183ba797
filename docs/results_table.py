"""The ranked table of docs/results.md, made from leaderboard/*.json: `python -m docs.results_table`."""

import re
from pathlib import Path

from certify.rows.intervals import interval
from certizoo.norms import L2
from docs.generate.entries import NORMS, Entry, entries, eps_name
from docs.generate.tables import code, table

PAGE = Path(__file__).parent / "results.md"
PLACE = re.compile(r"(?<=<!-- made by python -m docs\.results_table -->\n).*?(?=<!-- end of it -->)", re.S)
DATASET, NORM = "cifar10", L2
RADII = (0.1, 36 / 255, 72 / 255, 108 / 255)
HEADLINE = RADII[1]
IMAGES = 1000  # of our rows, where the row does not say otherwise


def markdown() -> str:
    """Return the table, best certified accuracy first."""
    found = sorted(ranked(), key=lambda e: (-e.certified(NORM, HEADLINE), e.name))
    heads = ("model", "sound", "clean", *(f"{NORMS[NORM]} {eps_name(eps)}" for eps in RADII))
    return "\n".join(["", table(heads, map(_row, found), right=heads[2:]), "", ""])


def ranked() -> list[Entry]:
    """Return the entries of the data set that have a figure at one of the radii."""
    return [e for e in entries() if e.text("dataset") == DATASET and any(e.at(NORM, eps) for eps in RADII)]


def _row(entry: Entry) -> list[str]:
    images = None if entry.published else int(entry.text("images"))
    points = [entry.at(NORM, eps) for eps in RADII]
    cells = ["" if p is None else _cell(p.eps, p.certified, p.attacked, images) for p in points]
    name = code(entry.name) if entry.published else f"**{code(entry.name)}**"
    name += f", first {images} images" if images not in (None, IMAGES) else ""
    return [name, entry.text("sound"), _share(entry.clean), *cells]


def _cell(eps: float, certified: float | None, attacked: float | None, images: int | None) -> str:
    """Return 'certified / attacked', with the 95 % interval of our certified share at the headline radius."""
    shown = _share(certified)
    if certified is not None and images is not None and abs(eps - HEADLINE) < 5e-5:
        shown += f" ({interval(certified / 100, images)})"
    return shown if attacked is None else f"{shown} / {attacked:.1f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1f}"


def main() -> None:
    """Write the table into the page."""
    PAGE.write_text(PLACE.sub(lambda _: markdown(), PAGE.read_text()))


if __name__ == "__main__":
    main()
