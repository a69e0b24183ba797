"""What a result says of itself, whichever command made it: what its rows belong to (the subject), and what is known of
the model and of the clean images (part of the summary)."""

import math
from pathlib import Path
from typing import Any

import pandas as pd

import zoo
from certify.rows.images import ImageList, digest
from certizoo import __version__

Summary = dict[str, Any]


def subject_of(handover: Path, listed: ImageList, **asked: Any) -> Summary:
    """The subject of a result, `subject.json`: the weights, the images, what was `asked` of them, the code's version.

    Rows on disk are continued for the same subject only; any change makes them another result.
    """
    return {
        "weights_sha256": zoo.handover.weights_sha256(handover),
        "data_digest": listed.test.digest,
        "first": listed.first,
        "images": listed.total,
        "images_sha256": listed.sha256,
        **asked,
        "certizoo": __version__,
    }


def norm_of(summary: Summary) -> str:
    """The norm of the certified radii; earlier code knew L2 alone, and need not say so."""
    norm: str = summary.get("norm", "l2")
    return norm


def model_facts(config: Summary) -> Summary:
    """The model of a hand-over, by the `config` in it."""
    return {
        "model": config["model"],
        "attention": zoo.attention_name(**config["model"]),
        "dataset": config.get("data", {}).get("name", "unknown"),
        "git_commit": config.get("git_commit", "unknown"),
    }


def chances(table: pd.DataFrame) -> Summary:
    """The probabilities that the bounds of one image, and that those of any image of the table, are no bounds: the
    second is at most the sum over the images that are classified correctly, as nothing is said of others."""
    together = math.fsum(table.loc[table["correct"], "failure"]) * (1 + 1e-9)
    return {
        "failure_probability_of_an_image": float(table["failure"].max()),
        "failure_probability_of_the_table": min(1.0, together),
    }


def image_facts(table: pd.DataFrame, method: str | None) -> Summary:
    """Which images the rows are of, the accuracy on them in [0,1], and the median radius that `method` certified."""
    return {
        "image_list_sha256": digest(table["key"].astype(str)),
        "clean": float(table["correct"].mean()),
        "median_radius": float(table[f"radius.{method}"].median()) if method else None,
    }
