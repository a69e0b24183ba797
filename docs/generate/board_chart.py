"""The chart of one question: certified and attacked accuracy over the radius, in the page's own colours.

It is an inline SVG whose colours are CSS variables (docs/assets/site.css), so it follows the light and the dark mode.
The legend stands below the chart.
"""

from collections.abc import Sequence

from certify.rows.intervals import axis_of
from certify.stage.report.charts import Axes, legend, picture
from certify.stage.report.html import Element, el
from docs.generate.board_table import as_text
from docs.generate.entries import Entry, Question, eps_name, share

EACH = 4  # entries of ours, and published ones
POINTS = 2  # an entry with fewer certified points is no curve


def html(question: Question) -> str:
    """Return the chart of the best entries of both kinds, or '' if none has a curve."""
    shown = chosen(question)
    if not shown:
        return ""
    unit, label = axis_of(question.norm)
    end = unit * max(point.eps for entry in shown for point in entry.curve(question.norm))
    axes = Axes((0.0, 1.04 * end), (0.0, 100.0))
    lines = [part for i, entry in enumerate(shown) for part in _lines(axes, entry, question.norm, unit, f"c{i}")]
    alt = f"Certified accuracy over the radius on {question.title}: {'; '.join(_words(e, question) for e in shown)}."
    names = {f"{e.name}{' (published)' if e.published else ''}": f"c{i}" for i, e in enumerate(shown)}
    chart = picture(alt, *axes.frame(label, "% of the images"), *lines)
    note = el("p", "Lines: certified. Dots: after the attack.", class_="note")
    return as_text(el("figure", chart, legend(names), note, class_="chart", data_search_exclude=""))


def chosen(question: Question) -> list[Entry]:
    """Return the best of ours, then the best published entries, in the order of the ranking."""
    curves = [entry for entry in question.entries if len(_certified(entry, question.norm)) >= POINTS]
    return [e for kind in (False, True) for e in [e for e in curves if e.published == kind][:EACH]]


def _certified(entry: Entry, norm: str) -> list[tuple[float, float]]:
    return [(point.eps, point.certified) for point in entry.curve(norm) if point.certified is not None]


def _lines(axes: Axes, entry: Entry, norm: str, unit: float, kind: str) -> list[Element]:
    start = [] if entry.clean is None else [(0.0, entry.clean)]
    points = [*start, *_certified(entry, norm)]
    xs, ys = [unit * eps for eps, _ in points], [percent for _, percent in points]
    parts = [el("polyline", points=axes.points(xs, ys), class_=f"line {kind}{' published' if entry.published else ''}")]
    for point in entry.curve(norm):
        if point.attacked is not None:
            words = f"{entry.name}, {eps_name(point.eps)}: {share(point.certified)} / {share(point.attacked)}"
            at = {"cx": axes.x(unit * point.eps), "cy": axes.y(point.attacked)}
            parts.append(el("circle", el("title", words), r=3.5, class_=f"dot {kind}", **at))
    return parts


def _words(entry: Entry, question: Question) -> str:
    at: Sequence[str] = [f"{percent:.1f} % at {eps_name(eps)}" for eps, percent in _certified(entry, question.norm)]
    return f"{entry.name} {', '.join(at)}"
