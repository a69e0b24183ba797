"""The report's accuracies: the headline, the grid of eps with intervals, and the curve."""

import numpy as np
import pandas as pd

from certify.rows.intervals import axis_of, end_of_axis, eps_in, interval, percent, radius_in, wilson
from certify.rows.summary import Summary
from certify.stage.report.charts import Axes, legend, picture
from certify.stage.report.html import Element, el, table
from certizoo.norms import NAMES

CURVE_POINTS = 240


def tiles(summary: Summary) -> Element:
    """Return the four figures of the headline."""
    norm, n = summary["norm"], summary["images"]
    at = summary["accuracy"][f"{summary['headline_eps']:g}"]
    eps = eps_in(norm, summary["headline_eps"])
    shares = {"clean": summary["clean"], f"after PGD, eps {eps}": at["pgd"], f"certified, eps {eps}": at["certified"]}
    boxes = [
        el("div", word, el("b", f"{percent(share)} %"), el("span", interval(share, n), class_="dim"))
        for word, share in shares.items()
    ]
    radius = el("div", "median certified radius", el("b", radius_in(norm, summary["median_radius"])))
    return el("div", *boxes, radius, class_="tiles")


def grid(summary: Summary) -> Element:
    """Return the table with one row per eps."""
    norm = summary["norm"]
    head = [
        f"{NAMES[norm]} eps",
        "clean %",
        "after PGD %",
        "95 % interval",
        "certified %",
        "95 % interval",
        "unknown %",
    ]
    n, clean = summary["images"], percent(summary["clean"])
    rows: list[list[Element | str]] = []
    for eps, at in summary["accuracy"].items():
        pgd, certified = at["pgd"], at["certified"]
        shares = (percent(pgd), interval(pgd, n), percent(certified), interval(certified, n), percent(at["unknown"]))
        rows.append([eps_in(norm, float(eps)), clean, *shares])
    caption = (
        f"Of {n} images. PGD is an upper bound of the true accuracy, certified a lower one; the intervals (Wilson) are "
        "for all images of this kind. Unknown: classified correctly, but the bound is not a finite number."
    )
    return table(caption, head, rows)


def curve(summary: Summary, rows: pd.DataFrame) -> list[Element]:
    """Return the chart: certified accuracy from the radii of all images, PGD at the grid, each with its interval."""
    n, method, clean = summary["images"], summary["method"], summary["clean"]
    radius = np.where(rows["correct"], rows[f"radius.{method}"].astype(float), -1.0)
    end = end_of_axis(radius, {eps: at["pgd"] for eps, at in _grid(summary)})
    eps = np.linspace(0, end, CURVE_POINTS)
    shares = (radius[:, None] >= eps).mean(0)
    band = 100 * np.array([wilson(float(share), n) for share in shares])
    norm = summary["norm"]
    unit, label = axis_of(norm)
    axes = Axes((0.0, unit * end), (0.0, 100.0))
    level = {"x1": axes.x(0), "x2": axes.x(unit * end), "y1": axes.y(100 * clean), "y2": axes.y(100 * clean)}
    text = [
        f"eps {eps_in(norm, eps)}: certified {percent(a['certified'])} %, PGD {percent(a['pgd'])} %"
        for eps, a in _grid(summary)
    ]
    eps = unit * eps
    drawing = picture(
        f"Accuracy against eps. Clean {percent(clean)} %; {'; '.join(text)}.",
        *axes.frame(label, "accuracy in %"),
        el("polygon", points=axes.points([*eps, *eps[::-1]], [*band[:, 0], *band[::-1, 1]]), class_="band"),
        el("line", el("title", f"clean {percent(clean)} %"), class_="clean", **level),
        el("polyline", points=axes.points(list(eps), list(100 * shares)), class_="line"),
        *(part for at_eps, at in _grid(summary) if at_eps <= end for part in _marks(axes, norm, at_eps, at, n)),
    )
    words = {f"certified ({method}) with its 95 % band": "certified", "after PGD": "pgd", "clean": "clean"}
    return [drawing, legend(words)]


def _grid(summary: Summary) -> list[tuple[float, dict[str, float]]]:
    return [(float(eps), at) for eps, at in summary["accuracy"].items()]


def _marks(axes: Axes, norm: str, eps: float, at: dict[str, float], n: int) -> list[Element]:
    """Return the marks of both accuracies at one eps, and the interval of PGD's."""
    low, high = wilson(at["pgd"], n)
    x = axes.x(axis_of(norm)[0] * eps)
    parts = [el("line", x1=x, x2=x, y1=axes.y(100 * low), y2=axes.y(100 * high), class_="whisker")]
    for word in ("pgd", "certified"):
        note = f"eps {eps_in(norm, eps)}: {word} {percent(at[word])} % ({interval(at[word], n)})"
        parts.append(el("circle", el("title", note), cx=x, cy=axes.y(100 * at[word]), r=4, class_=word))
    return parts
