"""Results of a search: `results.csv`, a Pareto plot and parallel coordinates as PNG, and one page with both.

A trial is on the front if no other is at least as good in every objective and better in one: front = {i : no j with f_j
>= f_i in all and f_j > f_i in some objective}.
"""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from certizoo.files import whole_file, write_whole
from certizoo.registry.server import credentials
from tuning.live import Board
from tuning.search import Search
from tuning.spaces import Parameter

PAGE, PARETO, PARALLEL, TABLE = "search.html", "pareto.png", "parallel.png", "results.csv"
STYLE = (
    "body{font:15px sans-serif;margin:2em;max-width:72em} td,th{padding:.2em .7em;text-align:right} img{max-width:100%}"
)
LABELS = {"clean_acc": "clean accuracy in %", "pgd_acc": "attacked accuracy in % (PGD)",
          "certified_acc": "certified accuracy in %"}  # fmt: skip


def front(values: np.ndarray) -> np.ndarray:
    """Return front_N of values_NK, all maximised. Equal rows are all on it."""
    at_least_NN = (values[None] >= values[:, None]).all(-1)  # [i, j]: j is at least as good as i in every objective
    better_NN = (values[None] > values[:, None]).any(-1)
    return ~np.any(at_least_NN & better_NN, axis=1)


def table(board: Board) -> pd.DataFrame:
    """Return one row per trial: its state, parameters and figures."""
    rows = [
        {"trial": trial, "state": line.state, **line.values, **{key: line.figures.get(key) for key in board.shown},
         "epoch": line.figures.get("epoch"), "seconds": line.seconds,
         "ended": line.figures.get("timestamp"), "run_dir": line.figures.get("run_dir"),
         "why": line.why}
        for trial, line in board.lines.items()
    ]  # fmt: skip
    return pd.DataFrame(rows)


def axes_of(metric: Sequence[str]) -> list[str]:
    """Return the objectives of the front: the requested ones, or a single one and clean accuracy."""
    return list(metric) if len(metric) > 1 else list(dict.fromkeys([*metric, "clean_acc"]))


def write(search: Search, board: Board) -> Path:
    """Write all files into the search's folder and return the page."""
    rows = table(board)
    with whole_file(search.folder / TABLE) as part:
        rows.to_csv(part, index=False)
    done = rows[rows["state"] == "certified"].reset_index(drop=True)
    keys = axes_of(search.metric)
    on_front = front(done[keys].to_numpy(float)) if len(done) else np.zeros(0, bool)
    _save(pareto(done, keys, on_front), search.folder / PARETO)
    _save(parallel(done, search.parameters.parameters, search.metric[0]), search.folder / PARALLEL)
    write_whole(search.folder / PAGE, page(search, rows, list(done["trial"][on_front])))
    return search.folder / PAGE


def pareto(done: pd.DataFrame, keys: Sequence[str], on_front: np.ndarray) -> Figure:
    """Plot finished trials, the first objective upwards against the second; a third is the colour."""
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.add_subplot()
    y, x = keys[0], keys[-1] if len(keys) == 1 else keys[1]
    colour = {"c": 100 * done[keys[2]], "cmap": "viridis"} if len(keys) > 2 else {"color": "C0"}
    points = axes.scatter(100 * done[x], 100 * done[y], s=36, zorder=3, **colour)
    if len(keys) > 2:
        figure.colorbar(points, label=_label(keys[2]))
    best = done[on_front].sort_values(x)
    axes.plot(
        100 * best[x], 100 * best[y], "-o", color="C3", markersize=11, markerfacecolor="none", label="Pareto front"
    )
    for trial, at_x, at_y in zip(best["trial"], best[x], best[y], strict=True):
        name = trial.rsplit("_", 1)[-1].lstrip("0") or "0"
        axes.annotate(name, (100 * at_x, 100 * at_y), textcoords="offset points", xytext=(8, 4), fontsize=8)
    axes.set(xlabel=_label(x), ylabel=_label(y), title=f"{len(done)} finished trials")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def parallel(done: pd.DataFrame, parameters: Mapping[str, Parameter], objective: str) -> Figure:
    """Draw one line per trial through its parameters and the objective, which is its colour."""
    figure = Figure(figsize=(1.6 * (len(parameters) + 1) + 1, 4), layout="constrained")
    axes = figure.add_subplot()
    keys = [*parameters, objective]
    heights_NK = np.column_stack([_heights(done[key], parameters.get(key)) for key in keys])
    for row, value in sorted(zip(heights_NK, done[objective], strict=True), key=lambda pair: pair[1]):
        share = (value - done[objective].min()) / (np.ptp(done[objective]) or 1)
        axes.plot(range(len(keys)), row, color=_colour(share), alpha=0.8)
    for place, key in enumerate(keys):
        _ticks(axes, place, done[key], parameters.get(key))
    names = [key.removeprefix("model.").replace("attention.", "").split(".", 1)[-1] for key in parameters]
    axes.set_xticks(range(len(keys)), [*names, objective], rotation=15)
    axes.set(yticks=[], ylim=(-0.08, 1.08), title="parameters of the finished trials; yellow: better")
    return figure


def _heights(column: pd.Series, parameter: Parameter | None) -> np.ndarray:
    """Scale values to [0, 1]: logarithmic if they were drawn so, with 0 at the bottom; names by their order."""
    if parameter is not None and parameter.kind == "choice":
        return np.array([parameter.options.index(value) for value in column]) / max(1, len(parameter.options) - 1)
    values = column.to_numpy(float)
    if parameter is None:
        return (values - values.min(initial=1)) / (np.ptp(values) or 1) if len(values) else values
    low, high = parameter.raw_low, parameter.high
    if parameter.kind == "log_uniform":
        values, low, high = np.log(np.maximum(values, low)), np.log(low), np.log(high)
    return (values - low) / (high - low)


def _ticks(axes: Axes, place: int, column: pd.Series, parameter: Parameter | None) -> None:
    """Label the ends of one axis."""
    ends: tuple[Any, Any] = ("", "")
    if parameter is None and len(column):
        ends = (f"{column.min():.1%}", f"{column.max():.1%}")
    elif parameter is not None:
        low = 0 if parameter.zero else parameter.low
        ends = (f"{low:g}", f"{parameter.high:g}")
        if parameter.options:
            ends = (parameter.options[0], parameter.options[-1])
    axes.axvline(place, color="grey", linewidth=0.8)
    for height, end in zip((-0.06, 1.04), ends, strict=True):
        axes.annotate(str(end), (place, height), ha="center", va="center", fontsize=8)


def _colour(share: float) -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"](share)


def _label(key: str) -> str:
    name, _, eps = key.partition("@")
    return LABELS[name] + (f" at eps {float(eps):.4g}" if eps else "")


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    with whole_file(path) as part:
        figure.savefig(part, dpi=120, format="png")


def page(search: Search, rows: pd.DataFrame, best: Sequence[str]) -> str:
    """Return a self-contained page with both figures and the table of all trials."""
    order = rows.sort_values(search.metric[0], ascending=False).drop(columns=["run_dir"])
    title = escape(f"Search {search.name}, space {search.space}")
    words = f"{len(rows)} trials; on the Pareto front: {escape(', '.join(best) or 'none')}."
    command = escape(f"trainers/{search.trainer}.py {' '.join(credentials.redacted(search.overrides))}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<h1>{title}</h1><p>{words}</p>"
        + "".join(_picture(search.folder / name) for name in (PARETO, PARALLEL))
        + order.to_html(index=False, float_format=lambda value: f"{value:.4g}", na_rep="", border=0)
        + f"<p>Every trial: <code>{command}</code></p></html>\n"
    )


def _picture(path: Path) -> str:
    return f'<img alt="{path.stem}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'
