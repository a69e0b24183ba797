"""The papers' figures from the tables of `certify.papers.analysis`, as PNG files without a display."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd

from certify.rows.records import write_png

EPS_LABEL = r"$\epsilon = \|X' - X\|_F$ at the layer's input (units of the activations)"
NEAR = 2  # bounds up to this multiple of the smallest value are shown again in a second row
CHANGE_LABEL = r"$\|F(X') - F(X)\|_F$ (units of the activations)"


@contextmanager
def canvas(path: Path, panels: int, rows: int = 1) -> Iterator[Sequence[Sequence[Any]]]:
    """Yield rows of axes side by side; write the file at the end."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(rows, panels, figsize=(5.2 * panels, 4.2 * rows), layout="constrained", squeeze=False)
    try:
        yield axes.tolist()
        write_png(path, figure)
    finally:
        plt.close(figure)


def violins(table: pd.DataFrame, path: Path) -> None:
    """Plot sigma_max of each block over the images: Figure 3 of CoViT, for blocks and for their branches."""
    titles = {"block": "block, $I + DF$", "branch": "branch alone, $DF$ (the paper's)"}
    with canvas(path, len(titles)) as (row,):
        for axes, (of, title) in zip(row, titles.items(), strict=True):
            chosen = table[table["of"] == of]
            groups = dict(list(chosen.groupby("block", sort=False)))
            for place, group in enumerate(groups.values()):
                sigma = group["sigma_max"].to_numpy()
                if len(sigma) > 1 and sigma.std() > 1e-9 * abs(sigma).max():  # a density estimate needs spread
                    axes.violinplot(sigma, [place], showmedians=True)
                else:
                    axes.plot([place] * len(sigma), sigma, "o", color="C0")
            labels = [f"{name!s}\n({group['measure'].iloc[0]})" for name, group in groups.items()]
            axes.set_xticks(range(len(groups)), labels, rotation=90 if len(groups) > 6 else 0)
            axes.set(xlabel="block (how measured)", ylabel=r"$\sigma_{max}$ of the Jacobian (output per input)")
            axes.set_title(f"{title}, {chosen['image'].nunique()} images")
            axes.grid(alpha=0.3, axis="y")
            axes.set_ylim(0, 1.05 * chosen["sigma_max"].max())


def against_eps(table: pd.DataFrame, name: str, path: Path) -> None:
    """Plot the mean over the images of every bound against eps: Figures 1 and 4 of LoFAST.

    There is one column for each scale of the input. The upper row has all bounds, the lower one those near what PGD
    finds. Dashed lines are not bounds.
    """
    with canvas(path, table["input_scale"].nunique(), rows=2) as (whole, near):
        for above, below, (_, group) in zip(whole, near, table.groupby("input_scale"), strict=True):
            _lines(above, group, "change")
            above.set_yscale("log")
            lowest = group.groupby("bound")["change"].mean().min()
            _lines(below, group, "change", highest=NEAR * lowest)
            for axes in (above, below):
                axes.set(xlabel=EPS_LABEL, ylabel=CHANGE_LABEL)
            above.set_title(rf"{name}, mean $\|X\|_F$ = {group['input_norm'].mean():.3g}")


def head_parts(table: pd.DataFrame, name: str, path: Path) -> None:
    """Plot the two factors of Delta_2 for one head against eps: Figure 1 of LoFAST, left and middle."""
    labels = {
        "delta_21": r"$\|P(X') - P(X)\|_F$ (probability)",
        "delta_22": r"$\|X' W^V W^O\|$ (units of the activations)",
    }
    with canvas(path, len(labels)) as (row,):
        for axes, (of, label) in zip(row, labels.items(), strict=True):
            _lines(axes, table[table["of"] == of], "value")
            axes.set(xlabel=EPS_LABEL, ylabel=label)
            axes.set_title(f"{name}, first head")


def _lines(axes: Any, table: pd.DataFrame, column: str, highest: float = math.inf) -> None:
    """Draw the lines with a mean up to `highest`; colours do not depend on which are omitted."""
    for i, (label, group) in enumerate(table.groupby("bound", sort=False)):
        mean = group.groupby("eps")[column].mean()
        if mean.mean() > highest:
            continue
        unsound = "unsound" in str(label)
        style = {"linestyle": "--" if unsound else "-", "marker": "x" if "PGD" in str(label) else "."}
        axes.plot(mean.index, mean.to_numpy(), label=label, color=f"C{i}", **style)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")


def ablation(table: pd.DataFrame, eps: float, path: Path) -> None:
    """Plot the lofast bound against changes of one weight, or of the input: Figure 3 of LoFAST, and scaling."""
    labels = {
        "perturbed": r"size of the perturbation of W, $\|\Delta W\|_F / \|W\|_F$",
        "scaled": "factor on W",
    }
    with canvas(path, len(labels)) as (row,):
        for axes, (kind, label) in zip(row, labels.items(), strict=True):
            for part, group in table[table["change"] == kind].groupby("part", sort=False):
                spread = group.groupby("size")["relative"]
                mean = spread.mean()
                (line,) = axes.plot(mean.index, mean.to_numpy(), marker=".", label=part)
                axes.fill_between(mean.index, spread.min(), spread.max(), alpha=0.2, color=line.get_color())
            axes.set(xlabel=label, ylabel="lofast bound / the unchanged one (1)")
            axes.set_title(rf"one part changed at a time, $\epsilon$ = {eps:g}")
            axes.grid(alpha=0.3)
            axes.legend()
