"""The certify stage: hand-over in, one row per image as it goes, then `certificate.json`, a curve and a model card.

OUT/certificates.jsonl    one row per image, written as it is proved; a second start goes on after the last one
OUT/certificates.parquet  the same rows as a table, when all are there
OUT/certificate.json      what was proved, of which weights, on which images, by which method and numerics
OUT/curve.png             certified and attacked accuracy against eps
OUT/card.md               the model card of the registry
OUT/report.html           all of it on one page, with the images nearest to the line
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import shards
import zoo
from certify.methods.breakdown import averaged
from certify.methods.certificate import SLACK
from certify.rows import images, records
from certify.rows.workers import in_order
from certify.stage import page, tables
from certify.stage.card import card
from certify.stage.command import command
from certify.stage.page import gallery
from certify.stage.prover import Prover
from certify.stage.settings import Settings
from certizoo import __version__
from certizoo.files import write_whole

ROWS, CERTIFICATE, REPORT = "certificates.jsonl", "certificate.json", "report.html"
Summary = dict[str, Any]

NORMS = (
    "of weights and small matrices: eigenvalue estimate verified by Cholesky with Rump's margin, proved; of Jacobians "
    "too large to be written out: Lanczos with a bound from the spectrum that it meets, proved but for the probability "
    "below"
)


def run(
    handover: Path,
    data: shards.DataConfig,
    settings: Settings,
    out: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Certify and attack the test images for the model in `handover`; returns the content of certificate.json.

    Resumes where an earlier start in `out` stopped; refuses an `out` that belongs to other weights, data or settings.
    `progress(done, total)` is called after every batch.
    """
    prover = Prover(handover, settings)  # refuses what cannot be certified before anything is written
    test = shards.find(data, "test")
    total = min(test.samples, settings.images or test.samples)
    subject = _subject(handover, test, settings, total)
    rows = records.resume(out / ROWS, subject)
    listed = images.batches(test, data, settings.batch_size, total, skip=len(rows))
    make = partial(Prover, handover, settings)
    with closing(in_order(prover, make, settings.workers, settings.device, listed)) as certified:
        for new in certified:
            records.append(out / ROWS, new)
            rows += new
            progress(len(rows), total)
    table = pd.DataFrame(rows)
    table.to_parquet(out / "certificates.parquet", index=False)
    summary = _summary(table, subject, prover.config, settings)
    tables.curve(table, settings.method, settings.eps, out / "curve.png")
    (out / "card.md").write_text(card(summary))
    shown = [row for side in gallery.chosen(table, settings.method, settings.headline_eps) for row in side]
    pictures = gallery.pictures(images.batches(test, data, settings.batch_size, total), shown) if shown else {}
    circumstances = page.Circumstances(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=command(handover, prover.config, data, settings),
        class_names=images.class_names(data),
    )
    write_whole(out / REPORT, page.report(summary, table, pictures, circumstances))
    records.write_json(out / CERTIFICATE, summary)
    return summary


def _subject(handover: Path, test: shards.ShardSet, settings: Settings, total: int) -> Summary:
    """What the rows belong to: any change makes them another result."""
    return {
        "weights_sha256": zoo.handover.weights_sha256(handover),
        "data_digest": test.digest,
        "images": total,
        "method": settings.method,
        "served_dtype": settings.served_dtype,
        "eps": list(settings.eps),
        "headline_eps": settings.headline_eps,
        "attack": asdict(settings.attack),
        "certizoo": __version__,
    }


def _summary(table: pd.DataFrame, subject: Summary, config: Summary, settings: Settings) -> Summary:
    """certificate.json: accuracies in [0,1] over the same images."""
    per_eps = {
        f"{eps:g}": {
            "certified": float((table[f"certified.{eps:g}"] == "certified").mean()),
            "unknown": float((table[f"certified.{eps:g}"] == "unknown").mean()),
            "pgd": float(table[f"pgd.{eps:g}"].mean()),
        }
        for eps in settings.eps
    }
    model = config["model"]
    return {
        **subject,
        "model": model,
        "attention": zoo.attention_name(**model),
        "dataset": config.get("data", {}).get("name", "unknown"),
        "penalty": config.get("penalty") or {},
        "training": {key: config.get(key) for key in ("attack", "objective", "optimizer", "train", "seed")},
        "git_commit": config.get("git_commit", "unknown"),
        "threat_model": {
            "norm": "l2",
            "space": f"[0,1] pixels of the {data_size(model)} image the model takes; the whole ball, box ignored",
        },
        "numerics": {
            "dtype": "float64 weights widened from the served float32 ones",
            "norms": NORMS,
            "failure_probability_of_an_image": float(table["failure"].max()),
            "slack": f"margin - loss > {SLACK:g} (1 + |margin| + loss)",
            "served_dtype": settings.served_dtype or "float32",
            "rounding_of_the_served_model": "proved" if settings.served_dtype else "measured",
            "largest_logit_difference_served_to_float64": float(table["served_difference"].max()),
            "torch": torch.__version__,
        },
        "image_list_sha256": images.digest(table["key"].astype(str)),
        "clean": float(table["correct"].mean()),
        "accuracy": per_eps,
        "median_radius": float(table[f"radius.{settings.method}"].median()),
        "breakdown": averaged(table, settings.headline_eps),
        "seconds_per_image": float(table["seconds"].mean()),
    }


def data_size(model: Summary) -> str:
    """'32x32' of a model config, or 'given' where the config does not say."""
    size = model.get("img_size")
    return f"{size}x{size}" if size else "given"
