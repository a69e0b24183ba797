"""The certify stage: hand-over in, one row per image as it goes, then `certificate.json`, a curve and a model card.

OUT/certificates.jsonl    one row per image, written as it is proved; a second start continues after the last one
OUT/certificates.parquet  the same rows as a table, when all are there
OUT/certificate.json      what was proved, of which weights, on which images, by which method and numerics
OUT/curve.png             certified and attacked accuracy against eps
OUT/card.md               the model card of the registry
OUT/report.html           all of it on one page, with the borderline images
"""

from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pandas as pd
import torch

import zoo
from certify.methods import crown
from certify.rows import images, records, runner
from certify.rows.draws import Nonce, derived, nonce_of
from certify.rows.summary import Summary, chances, image_facts, model_facts, subject_of
from certify.shared.breakdown import averaged
from certify.shared.certificate import SLACK
from certify.stage import assumptions, report, reproduce, tables
from certify.stage.certify_batch import CertifyBatch
from certify.stage.model_card import model_card
from certify.stage.outcomes import POSITION_ONLY, row_schema_of
from certify.stage.report import gallery
from certify.stage.settings import Settings
from certify.stage.substitutions import COLUMN
from certizoo import UserError, shards
from certizoo.files import write_whole
from certizoo.progress import Progress, silent
from certizoo.shards.format import tokens
from certizoo.shards.format.config import TEXT

ROWS, CERTIFICATE = records.CERTIFICATES, records.CERTIFICATE
TABLE, CURVE, CARD, REPORT = "certificates.parquet", "curve.png", "card.md", "report.html"

NORMS = (
    "of weights and small matrices: eigenvalue estimate verified by Cholesky with Rump's margin; of Jacobians too "
    "large to be written out: Lanczos with a bound from the spectrum that it meets, which fails with the probability "
    "below, over the nonce"
)


def run(
    handover: Path,
    data: shards.DataConfig,
    settings: Settings,
    out: Path,
    progress: Progress = silent,
    share: images.Share = images.WHOLE,
) -> Summary:
    """Certify and attack the test images for the model in `handover`; return the content of certificate.json.

    Resumes where an earlier start in `out` stopped; refuses an `out` that belongs to other weights, data or settings,
    or in which another process is at work. `progress(done, total)` is called at first and after every batch.
    """
    with records.results(out):
        return _run(handover, data, settings, out, progress, share)


def _run(
    handover: Path, data: shards.DataConfig, settings: Settings, out: Path, progress: Progress, share: images.Share
) -> Summary:
    listed = images.image_list(data, settings.images, settings.batch_size, share.first)
    nonce = _nonce(settings, handover, listed, out, share)
    settings = replace(settings, nonce=nonce.text)
    make = partial(CertifyBatch, settings=settings)
    own = make(handover)  # refuses a model that cannot be certified before anything is written
    settings = own.settings
    subject = subject_of(handover, listed, **_asked(settings) | nonce.said())
    records.require_rows(out / CERTIFICATE, ROWS)
    rows = runner.resume(out / ROWS, subject, listed, row_schema_of(settings.method, settings.grid))
    rows = rows.with_parts(share.parts)
    table = rows.complete(own, handover, make, settings.crew, progress)
    records.write_parquet(out / TABLE, table)
    summary = _summary(table, subject, own.config, settings) | records.digests(out, ROWS, TABLE)
    tables.curve(table, settings.method, settings.norm, settings.grid, out / CURVE)
    write_whole(out / CARD, model_card(summary))
    command = reproduce.command(handover, own.config, data, settings, share.first)
    write_whole(out / REPORT, _report(table, summary, listed, command))
    records.write_json(out / CERTIFICATE, summary)
    return summary


def _nonce(settings: Settings, handover: Path, listed: images.ImageList, out: Path, share: images.Share) -> Nonce:
    if settings.beacon is None:
        return nonce_of(settings.nonce, out / ROWS, share.parts)
    if settings.nonce is not None:
        raise UserError(f"nonce={settings.nonce} beacon={settings.beacon} exclude each other; remove one of them")
    return derived(zoo.handover.weights_sha256(handover), listed.sha256, settings.beacon)


def _asked(settings: Settings) -> Summary:
    """Return the settings that determine the rows, besides weights and images."""
    return {
        "method": settings.method,
        "norm": settings.norm,
        "nonce": settings.nonce,
        "served_dtype": settings.served_dtype,
        "eps": list(settings.grid),
        "headline_eps": settings.headline,
        "search_radii": settings.search_radii,
        "attack": asdict(settings.attack_in_norm),
    }


def _report(table: pd.DataFrame, summary: Summary, listed: images.ImageList, command: str) -> str:
    """Return report.html, with its pictures read from the shards."""
    shown = [row for side in gallery.chosen(table, summary["method"], summary["headline_eps"]) for row in side]
    words = tokens.load(listed.data.tokens).words if listed.data.kind == TEXT else None
    pictures = gallery.pictures(listed.batches(), shown, words) if shown else {}
    date, names = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), images.class_names(listed.data)
    return report.report(summary, table, pictures, report.Circumstances(date, command, names))


def _summary(table: pd.DataFrame, subject: Summary, config: Summary, settings: Settings) -> Summary:
    """Return the content of certificate.json."""
    return {
        **subject,
        **model_facts(config),
        "penalty": config.get("penalty") or {},
        "training": {key: config.get(key) for key in ("attack", "objective", "optimizer", "train", "seed")},
        "threat_model": {
            "norm": settings.norm,
            "space": _space(config["model"]),
        },
        "numerics": _numerics(table, settings.served_dtype),
        "assumptions": _assumptions(table, settings),
        **image_facts(table, settings.method),
        "clean_without_content": float(table[POSITION_ONLY].mean()) if POSITION_ONLY in table else None,
        **({COLUMN: float(table[COLUMN].mean())} if COLUMN in table else {}),
        "accuracy": {f"{eps:g}": _accuracy(table, f"{eps:g}") for eps in settings.grid},
        "breakdown": averaged(table, settings.headline),
        "seconds_per_image": float(table["seconds"].mean()),
    }


def _accuracy(table: pd.DataFrame, eps: str) -> Summary:
    """Return shares of the images, in [0,1]."""
    return {
        "certified": float((table[f"certified.{eps}"] == "certified").mean()),
        "unknown": float((table[f"certified.{eps}"] == "unknown").mean()),
        "pgd": float(table[f"pgd.{eps}"].mean()),
    }


def _numerics(table: pd.DataFrame, served_dtype: str | None) -> Summary:
    """Describe how the bounds were computed, and how they may fail."""
    return {
        "dtype": "float64 weights widened from the served float32 ones",
        "norms": NORMS,
        **chances(table),
        "slack": f"margin - loss > {SLACK:g} (1 + |margin| + loss), with clean activations' rounding in the loss",
        "served_dtype": served_dtype or "float32",
        "rounding_of_the_served_model": "proved" if served_dtype else "measured",
        "largest_logit_difference_served_to_float64": float(table["served_difference"].max()),
        "torch": torch.__version__,
    }


def _assumptions(table: pd.DataFrame, settings: Settings) -> list[Summary]:
    """Return the assumptions of the proof, each with the place that explains it."""
    failure = chances(table)["failure_probability_of_the_table"]
    of_best = settings.method == "best" and not settings.served_dtype and crown.installed()
    with_crown = settings.method == "crown" or of_best
    found = assumptions.assumptions(settings.served_dtype, failure, with_crown)
    return [assumption.said() for assumption in found]


def _space(model: Summary) -> str:
    """Return the space of the ball, in words."""
    if "vocabulary" in model:
        return "[0,1] embeddings of the sentence's words; the whole ball, box ignored; words themselves do not change"
    size = model.get("img_size")
    shape = f"{size}x{size}" if size else "given"
    return f"[0,1] pixels of the {shape} image the model takes; the whole ball, box ignored"
