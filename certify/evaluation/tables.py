"""The presentation of an evaluation: the terminal's table, the card, the bars, and the registry's tags."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from certify.rows.intervals import eps_words, interval, percent
from certify.rows.records import write_png
from certify.rows.summary import Summary, counted
from certizoo.norms import NAMES
from certizoo.text import code, markdown, plain

COLUMNS = ("attack", "norm", "eps", "accuracy %", "certified %", "median L2", "s/image")


def table(summary: Summary) -> Table:
    """Return the final table of a run, for the terminal; the intervals are in the card."""
    title = f"{summary['model']['name']} on {counted(summary)}, {summary['protocol']}"
    made = Table(title=Text(plain(title)))
    for i, column in enumerate(COLUMNS):
        made.add_column(column, justify="left" if i < 2 else "right")
    for row in _rows(summary, lambda of: percent(of["accuracy"])):
        made.add_row(*(Text(plain(cell)) for cell in row))
    return made


def card(summary: Summary) -> str:
    """Return the card in Markdown; a paragraph is one line, since the registry shows every line break."""
    attacks = [
        f"- {code(name)}: " + markdown(", ".join(f"{key} {value}" for key, value in options.items()))
        for name, options in summary["attacks"].items()
    ]

    def with_interval(of: Summary) -> str:
        return f"{percent(of['accuracy'])} ({interval(of['accuracy'], summary['images'])})"

    flags = [f"- **{markdown(flag['name'])}**: {markdown(flag['message'])}" for flag in summary["flags"]] or ["None."]
    certified = f"Certified by {summary['method']}, radii in {NAMES[summary['norm']]}."
    paragraphs = [
        f"# {markdown(summary['model']['name'])}: {markdown(summary['protocol'])}",
        f"{summary['images']} test images of {markdown(summary['dataset'])} (list sha256 "
        f"`{summary['image_list_sha256'][:16]}`), weights sha256 `{summary['weights_sha256'][:16]}`.",
        "\n".join(
            [
                "| " + " | ".join(COLUMNS) + " |",
                "|---" * len(COLUMNS) + "|",
                *(_line(map(markdown, row)) for row in _rows(summary, with_interval)),
            ]
        ),
        certified if summary["method"] else "Nothing was certified.",
        "An attacked accuracy is an upper bound of the robust one, a certified accuracy a lower bound, both of these "
        "images; intervals are Wilson's of 95 %. Attacks that succeeded within a certified radius: "
        f"{summary['found_within_certified_radius']}. Median L2: of the points that fooled, how far they are.",
        "## Flags",
        "\n".join(flags),
        "## Attacks",
        "\n".join(attacks),
    ]
    return "\n\n".join(paragraphs) + "\n"


def bars(summary: Summary, path: Path) -> None:
    """Plot the attacked and certified accuracy of every attack, with intervals, and the clean one as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    attacked = summary["accuracy"]
    certified = {name: of["certified"] for name, of in attacked.items() if of["certified"]}
    figure, axes = plt.subplots(figsize=(2 + 1.1 * len(attacked), 4.2), layout="constrained")
    _bars(axes, list(attacked), attacked, -0.2, label="attacked (upper bound)", color="C3")
    _bars(axes, list(attacked), certified, 0.2, label="certified (lower bound)", color="C0")
    axes.axhline(100 * summary["clean"], color="grey", linewidth=0.8, linestyle="--", label="clean")
    axes.set_xticks(range(len(attacked)), list(attacked), rotation=30, ha="right")
    axes.set(ylabel="accuracy in %", ylim=(0, 100))
    axes.set_title(f"{summary['protocol']}, {summary['images']} images")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize="small")
    write_png(path, figure)
    plt.close(figure)


def _bars(axes: Any, names: list[str], shares: Summary, shift: float, **style: str) -> None:
    """Draw one bar with its interval for every name that has a share."""
    places = [names.index(name) + shift for name in shares]
    heights = [100 * of["accuracy"] for of in shares.values()]
    below = [100 * (of["accuracy"] - of["interval"][0]) for of in shares.values()]
    above = [100 * (of["interval"][1] - of["accuracy"]) for of in shares.values()]
    axes.bar(places, heights, 0.38, yerr=[below, above], capsize=3, **style)


def metrics(summary: Summary) -> dict[str, float]:
    """Return the accuracies as numbers: `attacked_acc.<protocol>.<attack>`, and `proved_acc` against its whole ball."""
    values = {}
    for name, of in summary["accuracy"].items():
        values[f"attacked_acc.{summary['protocol']}.{name}"] = of["accuracy"]
        if of["certified"] is not None:
            values[f"proved_acc.{summary['protocol']}.{name}"] = of["certified"]["accuracy"]
    return values


def tags(summary: Summary) -> dict[str, str]:
    """Return the tags of the registered version."""
    flags = ", ".join(flag["name"] for flag in summary["flags"]) or "none"
    return {key: f"{value:.4f}" for key, value in metrics(summary).items()} | {f"flags.{summary['protocol']}": flags}


def _rows(summary: Summary, share: Callable[[Summary], str]) -> Iterator[list[str]]:
    yield ["clean", "", "", share({"accuracy": summary["clean"]}), "", "", ""]
    for name, of in summary["accuracy"].items():
        far = "" if of["median_l2"] is None else f"{of['median_l2']:.4g}"
        proved = "" if of["certified"] is None else share(of["certified"])
        yield [name, of["norm"], eps_words(of["eps"]), share(of), proved, far, f"{of['seconds_per_image']:.3g}"]
    for of in summary["worst_case"]:
        yield [f"all {len(of['attacks'])}", of["norm"], eps_words(of["eps"]), share(of), "", "", ""]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
