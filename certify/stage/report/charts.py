"""Charts of the report as inline SVG: colours are CSS variables of the page, values are tooltips."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from certify.stage.report.html import Element, el

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 14, 44
BINS = 32


@dataclass(frozen=True)
class Axes:
    """A map from data coordinates to SVG coordinates."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)

    def points(self, xs: Sequence[float], ys: Sequence[float]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in zip(xs, ys, strict=True))

    def frame(self, x_label: str, y_label: str) -> list[Element]:
        """Return grid lines, ticks and labels."""
        x_0, x_1, y_0, y_1 = LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM, TOP
        parts = []
        for tick in ticks(*self.y_range):
            y = self.y(tick)
            parts.append(el("line", x1=x_0, x2=x_1, y1=y, y2=y, class_="grid"))
            parts.append(el("text", f"{tick:g}", x=x_0 - 6, y=y + 4, text_anchor="end"))
        for tick in ticks(*self.x_range):
            x = self.x(tick)
            parts.append(el("line", x1=x, x2=x, y1=y_0, y2=y_0 + 4, class_="axis"))
            parts.append(el("text", f"{tick:g}", x=x, y=y_0 + 17, text_anchor="middle"))
        parts.append(el("line", x1=x_0, x2=x_1, y1=y_0, y2=y_0, class_="axis"))
        parts.append(el("text", x_label, x=(x_0 + x_1) / 2, y=HEIGHT - 6, text_anchor="middle"))
        middle = (y_0 + y_1) / 2
        turned = f"rotate(-90 12 {middle:g})"
        parts.append(el("text", y_label, x=12, y=middle, text_anchor="middle", transform=turned))
        return parts


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers in [low, high]."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def picture(alt: str, *parts: Element) -> Element:
    """Return an SVG with the text alternative `alt`."""
    return el("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=alt)


def legend(entries: Mapping[str, str]) -> Element:
    """Return a legend of words and CSS classes."""
    return el("p", *(el("span", el("i", class_=kind), word) for word, kind in entries.items()), class_="legend")


def bins(values: np.ndarray, mark: float) -> np.ndarray:
    """Return about BINS edges over the values, one of them at `mark`, so that no bar straddles it."""
    low, high = min(mark, float(values.min())), max(mark, float(values.max()))
    width = (high - low) / BINS or 1.0
    return mark + width * np.arange(math.floor((low - mark) / width - 1e-9), math.ceil((high - mark) / width) + 1.5)


def histogram(alt: str, x_label: str, groups: Mapping[str, tuple[str, np.ndarray]], mark: float) -> Element:
    """Return stacked counts of several groups, word -> (CSS class, values), and a line at `mark`."""
    edges = bins(np.concatenate([values for _, values in groups.values()]), mark)
    counts = {word: np.histogram(values, edges)[0] for word, (_, values) in groups.items()}
    most = max(1, int(np.sum(list(counts.values()), axis=0).max(initial=1)))
    axes = Axes((float(edges[0]), float(edges[-1])), (0.0, 1.05 * most))
    parts = axes.frame(x_label, "images")
    below = np.zeros(len(edges) - 1)
    for word, (kind, _) in groups.items():
        for k in np.flatnonzero(counts[word]):
            top, bottom = axes.y(float(below[k] + counts[word][k])), axes.y(float(below[k]))
            left, right = axes.x(float(edges[k])), axes.x(float(edges[k + 1]))
            note = f"{counts[word][k]} {word}, {edges[k]:.4g} to {edges[k + 1]:.4g}"
            box = {"x": left + 0.5, "y": top, "width": max(0.5, right - left - 1), "height": bottom - top}
            parts.append(el("rect", el("title", note), class_=kind, **box))
        below = below + counts[word]
    line = el(
        "line", el("title", f"{mark:g}"), x1=axes.x(mark), x2=axes.x(mark), y1=TOP, y2=HEIGHT - BOTTOM, class_="mark"
    )
    return picture(alt, *parts, line)
