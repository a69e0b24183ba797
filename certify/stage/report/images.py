"""The report's images: histograms of margins and radii, and the borderline images one by one."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from certify.rows.intervals import axis_of, eps_in, radius_in
from certify.rows.summary import Summary
from certify.stage.report import gallery
from certify.stage.report.charts import histogram, legend
from certify.stage.report.html import Element, data, el
from certizoo.norms import NAMES

KINDS = {"certified": "certified", "not certified": "open", "unknown": "unknown", "misclassified": "wrong"}  # -> CSS


def histograms(summary: Summary, rows: pd.DataFrame) -> list[Element]:
    """Return margins of all images and radii of the correct ones, coloured by the answer at the headline eps."""
    eps, norm = summary["headline_eps"], summary["norm"]
    unit, _ = axis_of(norm)
    kind = np.where(rows["correct"], rows[f"certified.{eps:g}"], "misclassified")
    margins, radii = (rows[column].to_numpy(float) for column in ("margin", f"radius.{summary['method']}"))
    return [
        el("p", f"Coloured by the answer at eps {eps_in(norm, eps)}."),
        *_histogram("Margins of the label over the next class, in logits", "margin", margins, kind, 0.0),
        *_histogram(
            "Certified radii of the correctly classified images",
            f"{NAMES[norm]} radius" + (" in 1/255" if unit > 1 else ""),
            unit * radii[kind != "misclassified"],
            kind[kind != "misclassified"],
            unit * eps,
        ),
    ]


def _histogram(title: str, label: str, values: np.ndarray, kind: np.ndarray, mark: float) -> list[Element]:
    groups = {word: values[(kind == word) & np.isfinite(values)] for word in KINDS}
    found = {word: group for word, group in groups.items() if len(group)}
    if not found:
        return [el("h3", title), el("p", "There are none.", class_="dim")]
    counts = ", ".join(f"{len(group)} {word}" for word, group in found.items())
    return [
        el("h3", title),
        histogram(f"{title}: {counts}.", label, {word: (KINDS[word], group) for word, group in found.items()}, mark),
        legend({f"{word} ({len(group)})": KINDS[word] for word, group in found.items()}),
    ]


def borderline(
    summary: Summary, rows: pd.DataFrame, pictures: Mapping[int, str], names: Sequence[str] | None
) -> list[Element]:
    """Return the weakest certified images, and the strongest correct ones that are not certified."""
    parts = []
    sides = gallery.chosen(rows, summary["method"], summary["headline_eps"])
    for title, chosen in zip(("Weakest certified", "Strongest not certified"), sides, strict=True):
        figures = [_figure(summary, rows.loc[i].to_dict(), pictures[i], names) for i in chosen]
        empty = el("p", "There is no such image.", class_="dim")
        parts += [el("h3", title), el("div", *figures, class_="gallery") if figures else empty]
    return parts


def _figure(summary: Summary, row: dict[Any, Any], uri: str, names: Sequence[str] | None) -> Element:
    def called(label: int) -> Element:
        return data(f"{label} ({names[label]})" if names else label)

    eps = f"{summary['headline_eps']:g}"
    radius = row[f"radius.{summary['method']}"]
    entries: dict[str, Element | str] = {
        "key": data(row["key"]),
        "label": called(row["label"]),
        "predicted": called(row["prediction"]),
        "margin": f"{row['margin']:.4g}",
        "radius": radius_in(summary["norm"], radius),
        "proof": str(row[f"certified.{eps}"]),
        "PGD": "withstood" if row[f"pgd.{eps}"] else "beaten",
    }
    image = _shown(uri, f"test image {row['key']}, label {row['label']}")
    lines = [part for word, value in entries.items() for part in (el("dt", word), el("dd", value))]
    return el("figure", image, el("figcaption", el("dl", *lines)))


def _shown(given: str, description: str) -> Element:
    """Return an image from its data: URI, or a sentence."""
    if not given.startswith("data:image/"):
        return el("blockquote", data(given))
    return el("img", src=given, alt=description, class_="pixels" if given.startswith("data:image/png") else None)
