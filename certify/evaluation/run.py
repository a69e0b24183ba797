"""The evaluation: clean, attacked and certified on the same images, by every attack of a protocol.

OUT/evaluation.jsonl     one row an image, written block by block; a second start goes on after the last one
OUT/evaluation.parquet, evaluation.csv    the same rows as tables, when all are there
OUT/evaluation.json      accuracies with intervals, of which weights, images and attacks, and what the checks say
OUT/evaluation.md        the same for people: the card
OUT/evaluation.png       the accuracies as bars
OUT/robustbench_Linf.json, ..._L2.json    entries of RobustBench's model_info, where AutoAttack was run
OUT/refuted/             the images of a wrong certificate, if one was caught
"""

import json
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import shards
import zoo
from certify.evaluation import accuracies, checks, leaderboard, report
from certify.evaluation.examiner import Examiner
from certify.evaluation.settings import Settings
from certify.rows import images, records
from certify.rows.workers import Batch, in_order
from certizoo import __version__

ROWS, EVALUATION, CHECKS = "evaluation.jsonl", "evaluation.json", "checks.json"
TABLE, CARD, BARS = "evaluation.parquet", "evaluation.md", "evaluation.png"
DEFAULT_BALL = ("linf", 8 / 255)  # of the checks, where no attack has a ball
Summary = dict[str, Any]


def run(
    handover: Path,
    data: shards.DataConfig,
    settings: Settings,
    out: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Evaluate the model in `handover` on the test images; returns the content of evaluation.json.

    Resumes where an earlier start in `out` stopped; refuses an `out` that belongs to other weights, data or settings.
    Raises UnsoundCertificate, with the image kept, where an attack succeeds within a certified radius.
    """
    examiner = Examiner(handover, settings, out)  # refuses what cannot be done before anything is written
    test = shards.find(data, "test")
    total = min(test.samples, settings.images or test.samples)
    subject = _subject(handover, test, settings, total)
    rows = records.resume(out / ROWS, subject, settings.block)
    flags = _flags(examiner, settings, images.batches(test, data, settings.block, total), out / CHECKS)
    listed = images.batches(test, data, settings.block, total, skip=len(rows))
    make = partial(Examiner, handover, settings, out)
    with closing(in_order(examiner, make, settings.workers, settings.device, listed)) as examined:
        for new in examined:
            records.append(out / ROWS, new)
            rows += new
            progress(len(rows), total)
    table = pd.DataFrame(rows)
    summary = _summary(table, subject, examiner, flags)
    table.to_parquet(out / TABLE, index=False)
    table.to_csv(out / "evaluation.csv", index=False)
    for threat, entry in leaderboard.entries(summary, examiner.attacks):
        records.write_json(out / f"robustbench_{threat}.json", entry)
    report.bars(summary, out / BARS)
    (out / CARD).write_text(report.card(summary))
    records.write_json(out / EVALUATION, summary)
    return summary


def _subject(handover: Path, test: shards.ShardSet, settings: Settings, total: int) -> Summary:
    """What the rows belong to: any change makes them another result."""
    return {
        "weights_sha256": zoo.handover.weights_sha256(handover),
        "data_digest": test.digest,
        "images": total,
        "protocol": settings.protocol,
        "attacks": {name: dict(options) for name, options in settings.attacks.items()},
        "method": settings.method,
        "block": settings.block,
        "seed": settings.seed,
        "attack_dtype": settings.attack_dtype,
        "certizoo": __version__,
    }


def _flags(examiner: Examiner, settings: Settings, blocks: Iterable[Batch], path: Path) -> list[checks.Flag]:
    """Of the first correct images, in the ball of the protocol's first attack that has one; kept for a second start."""
    if not path.exists():
        ball = next(((attack.norm, attack.eps) for attack in examiner.attacks.values() if attack.eps), DEFAULT_BALL)
        correct = _correct(examiner, blocks, settings.check_images)
        flags = checks.of_model(checks.Subject(examiner.attacked, *correct, *ball))
        records.write_json(path, {"images": settings.check_images, "flags": [vars(flag) for flag in flags]})
    return [checks.Flag(**flag) for flag in json.loads(path.read_text())["flags"]]


def _correct(examiner: Examiner, blocks: Iterable[Batch], count: int) -> tuple[Tensor, Tensor]:
    """The first `count` images that the model classifies correctly, and their labels."""
    found: list[tuple[Tensor, Tensor]] = []
    for _, images_BCHW, labels in blocks:
        x, y = images_BCHW.to(examiner.device), labels.to(examiner.device)
        correct = examiner.model(x).argmax(1) == y
        found.append((x[correct], y[correct]))
        if sum(len(part) for _, part in found) >= count:
            break
    x, y = (torch.cat(parts)[:count] for parts in zip(*found, strict=True))
    return x, y


def _summary(table: pd.DataFrame, subject: Summary, examiner: Examiner, flags: list[checks.Flag]) -> Summary:
    """evaluation.json: accuracies in [0,1] over the same images."""
    config, attacks, method = examiner.config, examiner.attacks, examiner.settings.method
    return {
        **subject,
        "model": config["model"],
        "attention": zoo.attention_name(**config["model"]),
        "dataset": config.get("data", {}).get("name", "unknown"),
        "git_commit": config.get("git_commit", "unknown"),
        "image_list_sha256": images.digest(table["key"].astype(str)),
        "torch": torch.__version__,
        "clean": float(table["correct"].mean()),
        "accuracy": accuracies.by_attack(table, attacks),
        "worst_case": accuracies.by_ball(table, attacks),
        "median_radius": float(table[f"radius.{method}"].median()) if method else None,
        "found_within_certified_radius": accuracies.within_radius(table, attacks, method),
        "flags": [vars(flag) for flag in [*flags, *checks.of_table(table, attacks)]],
    }
