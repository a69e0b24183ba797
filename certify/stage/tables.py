"""The presentation of a certificate: the curve, the terminal's table, and the registry's tags."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from rich.table import Table
from rich.text import Text

from certify.rows.intervals import axis_of, end_of_axis, eps_in, percent, wilson
from certify.rows.records import write_png
from certify.rows.summary import Summary, counted
from certizoo.norms import NAMES
from certizoo.registry.versions import version_tags
from certizoo.text import plain
from zoo import penalty


def curve(table: pd.DataFrame, method: str, norm: str, eps_grid: Sequence[float], path: Path) -> None:
    """Plot certified accuracy against eps from the radii of all images, with the attacked accuracy at the grid."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    radius = np.where(table["correct"], table[f"radius.{method}"], -1.0)
    survived = {eps: float(table[f"pgd.{eps:g}"].mean()) for eps in eps_grid}
    end = end_of_axis(radius, survived)
    eps = np.linspace(0, end, 400)
    certified = 100 * (radius[:, None] >= eps).mean(0)
    unit, label = axis_of(norm)
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    axes.plot(unit * eps, certified, label=f"certified ({method})")
    attacked = 100 * np.array(list(survived.values()))
    axes.plot(unit * np.array(eps_grid), attacked, "x", color="C3", label="attacked (PGD, upper bound)")
    axes.axhline(100 * table["correct"].mean(), color="grey", linewidth=0.8, linestyle="--", label="clean")
    axes.set(xlabel=label, ylabel="accuracy in %", xlim=(0, unit * end), ylim=(0, 100))
    axes.set_title(f"{len(table)} images")
    axes.grid(alpha=0.3)
    axes.legend()
    write_png(path, figure)
    plt.close(figure)


def table(summary: Summary) -> Table:
    """Return the final table of a run, for the terminal."""
    title = f"{summary['model']['name']} on {counted(summary)}, in %"
    made = Table(title=Text(plain(title)))
    norm = summary["norm"]
    for column in (f"{NAMES[norm]} eps", "clean", "PGD", f"certified ({summary['method']})", "unknown"):
        made.add_column(column, justify="right")
    for eps, accuracy in summary["accuracy"].items():
        cells = (summary["clean"], accuracy["pgd"], accuracy["certified"], accuracy["unknown"])
        made.add_row(eps_in(norm, float(eps)), *(percent(value) for value in cells))
    return made


def tags(summary: Summary) -> dict[str, str]:
    """Return the tags of the registered version: `certified_acc.<eps>`, `clean_acc`, `pgd_acc.<eps>`, `method`, ...

    In a norm other than L2 they are `certified_acc.<norm>.<eps>`, as the registry defines them.
    """
    norm, accuracy = summary["norm"], summary["accuracy"]
    return {key: f"{value:.4f}" for key, value in metrics(summary).items()} | {
        "method": summary["method"],
        "dataset": summary["dataset"],
        "attention": summary["attention"],
        "penalty": penalty.name_of(summary["penalty"]),
        "git_commit": summary["git_commit"],
        "norm": norm,
        "images": str(summary["images"]),
        "dtype": summary["numerics"]["served_dtype"],
        "torch": summary["numerics"]["torch"],
        "certizoo": summary["certizoo"],
        **{key: summary[key] for key in ("weights_sha256", "data_digest", "image_list_sha256")},
        **{
            version_tags.share(version_tags.LOW, norm, eps): _low(of["certified"], summary["images"])
            for eps, of in accuracy.items()
        },
    }


def _low(share: float, n: int) -> str:
    """Return Wilson's lower end, rounded down, by which champions are chosen."""
    return f"{math.floor(wilson(share, n)[0] * 10**4) / 10**4:.4f}"


def metrics(summary: Summary) -> dict[str, float]:
    """Return the accuracies as numbers."""
    values = {"clean_acc": summary["clean"]}
    for eps, accuracy in summary["accuracy"].items():
        for family, key in version_tags.SHARES.items():
            values[version_tags.share(family, summary["norm"], eps)] = accuracy[key]
    return values
