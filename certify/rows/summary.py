"""The parts of a result that all commands share: its subject, and the facts of the model and of the clean images."""

import math
from pathlib import Path
from typing import Any

import pandas as pd

import zoo
from certify.rows.images import ImageList, digest
from certizoo import __version__

Summary = dict[str, Any]


def subject_of(handover: Path, listed: ImageList, **asked: Any) -> Summary:
    """Return the subject of a result, `subject.json`: weights, images, the settings `asked`, and the code's version.

    Rows on disk are continued for the same subject only; any change makes a different result.
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


def counted(summary: Summary) -> str:
    """Return the number of images, or of sentences, and their data set."""
    kind = "sentences" if "vocabulary" in summary["model"] else "images"
    return f"{summary['images']} {kind} of {summary['dataset']}"


def model_facts(config: Summary) -> Summary:
    """Return the facts of a hand-over's model from its `config`."""
    return {
        "model": config["model"],
        "attention": zoo.attention_name(**config["model"]),
        "dataset": config.get("data", {}).get("name", "unknown"),
        "git_commit": config.get("git_commit", "unknown"),
    }


def chances(table: pd.DataFrame) -> Summary:
    """Return the probabilities that the bounds of one image, and those of any image of the table, are wrong.

    The second is at most the sum over the correctly classified images, as nothing is claimed of others.
    """
    together = math.fsum(table.loc[table["correct"], "failure"]) * (1 + 1e-9)
    return {
        "failure_probability_of_an_image": float(table["failure"].max()),
        "failure_probability_of_the_table": min(1.0, together),
    }


def image_facts(table: pd.DataFrame, method: str | None) -> Summary:
    """Return the digest of the rows' images, their accuracy in [0,1], and the median radius certified by `method`."""
    return {
        "image_list_sha256": digest(table["key"].astype(str)),
        "clean": float(table["correct"].mean()),
        "median_radius": float(table[f"radius.{method}"].median()) if method else None,
    }
