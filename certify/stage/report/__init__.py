"""`report.html`: what was proved of a model, on one self-contained page.

Every accuracy on it is that of certificate.json, which is printed in full at its end.
"""

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from certify.rows.intervals import eps_in
from certify.stage.report.accuracy import curve, grid, tiles
from certify.stage.report.html import data, document, el
from certify.stage.report.images import borderline, histograms
from certify.stage.report.model import Circumstances, costs, facts
from certify.stage.report.style import CSS
from certizoo.norms import NAMES

__all__ = ["Circumstances", "report"]


def report(
    summary: dict[str, Any], rows: pd.DataFrame, pictures: Mapping[int, str], circumstances: Circumstances
) -> str:
    """Return the page of a certificate and its rows. `pictures` maps the rows of `gallery.chosen` to data: URIs."""
    name = str(summary["model"]["name"])
    norm = summary["norm"]
    words = f"Certified {NAMES[norm]} robustness by {summary['method']} on {summary['images']} test images of "
    return document(
        f"{name}: certified robustness",
        CSS,
        el("header", el("h1", data(name)), el("p", words, data(summary["dataset"]), ".")),
        tiles(summary),
        el("h2", "Accuracy against eps"),
        *curve(summary, rows),
        grid(summary),
        el("h2", "Margins and certified radii"),
        *histograms(summary, rows),
        el("h2", f"Borderline images at eps {eps_in(norm, summary['headline_eps'])}"),
        *borderline(summary, rows, pictures, circumstances.class_names),
        el("h2", "Which step costs most"),
        *costs(summary["breakdown"], norm),
        el("h2", "What was certified, and how"),
        *facts(summary, circumstances),
        el("details", el("summary", "certificate.json"), el("pre", json.dumps(summary, indent=2), id="certificate")),
    )
