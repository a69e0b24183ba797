"""Figure 2 of SpecFormer from the tables of `certify.papers.feature_report`, and its final table for the terminal."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from certify.papers.figures import canvas
from certify.papers.layer_norms import WEIGHTS
from certify.rows.intervals import percent

MARKERS = {"clean": "o", "attacked": "x"}
LISTED = 20  # largest number of classes that the legend lists
Row = Mapping[str, Any]


def planes(points: pd.DataFrame, rows: Sequence[Row], class_names: Sequence[str] | None, path: Path) -> None:
    """Plot the t-SNE of clean and attacked features, a panel for each model: Figures 2b and 2c."""
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    labels = sorted(points["label"].unique())
    colours = colormaps["tab10" if len(labels) <= 10 else "tab20" if len(labels) <= LISTED else "gist_rainbow"]
    colour_of = {label: colours(i if len(labels) <= LISTED else i / len(labels)) for i, label in enumerate(labels)}
    with canvas(path, len(rows)) as (panels,):
        for axes, row in zip(panels, rows, strict=True):
            for of, marker in MARKERS.items():
                chosen = points[(points["model"] == row["name"]) & (points["of"] == of)]
                colour_N = [colour_of[label] for label in chosen["label"]]
                style = {"marker": marker, "s": 14, "linewidths": 0.8, "alpha": 0.75}
                edges = {"edgecolors": "none"} if of == "clean" else {}
                axes.scatter(chosen["x"], chosen["y"], c=colour_N, **style, **edges)
            axes.set_title(f"{row['name']}\n{_line(row)}", fontsize="medium")
            axes.set(xlabel="t-SNE 1 (no unit)", ylabel="t-SNE 2 (no unit)", xticks=[], yticks=[])
        named = labels if len(labels) <= LISTED else []
        keys: list[tuple[str, str, Any]] = [(of, marker, "black") for of, marker in MARKERS.items()]
        keys += [(class_names[label] if class_names else str(label), "s", colour_of[label]) for label in named]
        handles = [Line2D([], [], linestyle="", marker=marker, color=colour, label=key) for key, marker, colour in keys]
        panels[-1].legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")


def _line(row: Row) -> str:
    low, high = row["a_distance_interval"]
    return (
        f"A-distance {row['a_distance']:.2f} ({low:.2f} to {high:.2f}), "
        f"clean {percent(row['clean'])} %, attacked {percent(row['attacked'])} %"
    )


def layers(table: pd.DataFrame, path: Path) -> None:
    """Plot the norms of W_Q, W_K, W_V over the layers, a line for each model: Figure 2a."""
    colour_of = {name: f"C{i}" for i, name in enumerate(table["model"].unique())}
    weights = sorted(table["weight"].unique(), key=list(WEIGHTS.values()).index)
    highest = 1.2 * table["sigma_max"].max()
    with canvas(path, len(weights)) as (panels,):
        for axes, weight in zip(panels, weights, strict=True):
            for name, group in table[table["weight"] == weight].groupby("model", sort=False):
                axes.plot(group["layer"], group["sigma_max"], marker=".", color=colour_of[name], label=name)
            axes.set(xlabel="attention layer", ylabel=r"largest $\sigma_{max}$ of a head (output per input)")
            axes.set(ylim=(0, highest), title=f"${weight}$")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3)
        panels[0].legend(fontsize="small")


def closing_table(summary: Row) -> Table:
    """Return the table for the terminal, one column per model."""
    attack = summary["settings"]["attack"]
    title = f"PGD-{attack['steps']}, {attack['norm']} {attack['eps']:.4g}"
    table = Table(title=f"{summary['images']} images of {summary['dataset']}; {title}")
    table.add_column("")
    for row in summary["models"]:
        table.add_column(row["name"], justify="right")
    lines: dict[str, Callable[[Row], str]] = {
        "clean accuracy in %": lambda row: percent(row["clean"]),
        "attacked accuracy in %": lambda row: percent(row["attacked"]),
        "A-distance (0 to 2)": lambda row: f"{row['a_distance']:.2f}",
        "  95 % interval": lambda row: "{:.2f} to {:.2f}".format(*row["a_distance_interval"]),
    } | {f"largest sigma_max of {name}": partial(_norm, name) for name in WEIGHTS.values()}
    for label, cell in lines.items():
        table.add_row(label, *map(cell, summary["models"]))
    return table


def _norm(weight: str, row: Row) -> str:
    return f"{row['sigma_max'][weight]:.3g}" if weight in row["sigma_max"] else row["sigma_max_note"]
