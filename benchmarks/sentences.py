"""LoFAST's Figure 5: certified accuracy of sentences by layers, heads and caps, as columns and as a picture.

Columns of a run: clean accuracy on all test sentences; then, on those of the run's certificate, clean accuracy,
certified accuracy by the run's own method, accuracy under PGD, and the share of near words that the radius covers;
and certified accuracy by Theorem 1 of LoFAST on the first FEW, because it takes seconds a sentence.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from certify import certified_radius
from certizoo.shards import DataConfig, eval_loader, find
from zoo.models.sentences import by_length

EPS = ("0.1", "0.25", "0.5", "1")
FEW = 50
LOFAST = f"LoFAST (first {FEW})"
OF_EPS = tuple(f"{word} {eps}" for word in ("adjoint", "PGD", LOFAST) for eps in EPS)
COLUMNS = ("clean (all)", "clean", *OF_EPS, "words covered")
CAPS = ("0.25", "0.5", "0.75")
GRID = tuple(itertools.product((3, 6), (4, 8), CAPS))  # layers, heads, cap of W_V and W_O
BATCH = 200
PANEL = re.compile(r"(.*), W_V and W_O at most (.*)")


def method(layers: int, heads: int, cap: str) -> str:
    return f"{layers} layers, {heads} heads, W_V and W_O at most {cap}"


def options(cap: str) -> tuple[str, ...]:
    """Return the settings of a cap of W_V and W_O."""
    return tuple(f"model.attention.{weight}_cap={cap}" for weight in "vo")


def figures(folder: Path, data: DataConfig) -> dict[str, float]:
    """Return the columns of a finished run in `folder`, in per cent."""
    said = json.loads((folder / "certificate" / "certificate.json").read_text())
    model = zoo.handover.load(folder / "handover")[0]
    radii = lofast_radii(model, data, FEW)
    found = {"clean (all)": clean_share(model, data), "clean": said["clean"], "words covered": said["substitutions"]}
    for eps in EPS:
        at = said["accuracy"][eps]
        found |= {f"adjoint {eps}": at["certified"], f"PGD {eps}": at["pgd"]}
        found[f"{LOFAST} {eps}"] = sum(radius >= float(eps) for radius in radii) / len(radii)
    return {column: 100 * found[column] for column in COLUMNS}


def lofast_radii(model: nn.Module, data: DataConfig, count: int) -> list[float]:
    """Return the radii of Theorem 1 for the first test sentences, 0 where misclassified."""
    found = list[float]()
    for x_BCNT, labels_B in batches(model, data, count):
        found += certified_radius(model, x_BCNT, labels_B, "lofast").tolist()
    return found


@torch.no_grad()
def clean_share(model: nn.Module, data: DataConfig) -> float:
    """Return the share of all test sentences that are classified correctly."""
    right = [model(x_BCNT).argmax(1) == labels_B for x_BCNT, labels_B in batches(model, data)]
    return float(torch.cat(right).double().mean())


def batches(model: nn.Module, data: DataConfig, limit: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the first test sentences, embedded, and their labels; sentences of a batch have one length."""
    for batch in eval_loader(find(data, "test"), data, batch_size=limit or BATCH, limit=limit):
        yield from ((x_BCNT, labels_B) for _, x_BCNT, labels_B in by_length(model, *batch))


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw certified accuracy over eps: one panel for layers and heads, one colour for a cap, LoFAST dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [f"{layers} layers, {heads} heads" for layers, heads in itertools.product((3, 6), (4, 8))]
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 3.4), sharey=True, layout="constrained")
    eps = [0.0, *map(float, EPS)]
    for row in rows:
        found = PANEL.fullmatch(row["method"])
        assert found is not None
        axis, colour = axes[panels.index(found[1])], f"C{CAPS.index(found[2])}"
        for word, style in (("adjoint", "o-"), (LOFAST, "o--"), ("PGD", ":")):
            shares = [row["ours"]["clean"], *(row["ours"][f"{word} {radius}"] for radius in EPS)]
            axis.plot(eps, shares, style, color=colour, label=f"{word}, {found[2]}", markersize=3)
    for axis, title in zip(axes, panels, strict=True):
        axis.set(title=title, xlabel="L2 eps of embeddings", ylim=(0, 100))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("sentences, %")
    axes[0].legend(fontsize=6)
    figure.savefig(path)
    plt.close(figure)
