"""The evaluation: clean, attacked and certified answers for the same images, by every attack of a protocol.

OUT/evaluation.jsonl     one row per image, written block by block; a second start continues after the last one
OUT/evaluation.parquet, evaluation.csv    the same rows as tables, once all are there
OUT/evaluation.json      accuracies with intervals, the weights, images and attacks, and the flags of the checks
OUT/evaluation.md        the same for people: the card
OUT/evaluation.png       the accuracies as bars
OUT/robustbench_Linf.json, ..._L2.json    entries of RobustBench's model_info, if AutoAttack was run
OUT/refuted/             the images of a wrong certificate, if one was found
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from certify.evaluation import accuracies, checks, robustbench, tables
from certify.evaluation.certified import read
from certify.evaluation.evaluate_block import EvaluateBlock, row_schema_of
from certify.evaluation.settings import Settings
from certify.rows import images, records, runner
from certify.rows.draws import nonce_of
from certify.rows.summary import Summary, chances, image_facts, model_facts, subject_of
from certizoo import UserError, shards
from certizoo.documents import read_json
from certizoo.files import write_whole
from certizoo.progress import Progress, silent
from zoo.models.sentences import by_length

ROWS, EVALUATION, CHECKS = "evaluation.jsonl", "evaluation.json", "checks.json"
TABLE, CSV, CARD, BARS = "evaluation.parquet", "evaluation.csv", "evaluation.md", "evaluation.png"
DEFAULT_BALL = ("linf", 8 / 255)  # of the checks if no attack has a ball


def run(
    handover: Path,
    data: shards.DataConfig,
    settings: Settings,
    out: Path,
    progress: Progress = silent,
    share: images.Share = images.WHOLE,
) -> Summary:
    """Evaluate the model in `handover` on the test images; return the content of evaluation.json.

    Resumes where an earlier start in `out` stopped; refuses an `out` that belongs to other weights, data or settings,
    or in which another process is at work. Raises UnsoundCertificate, with the image kept, if an attack succeeds within
    a certified radius.
    """
    with records.results(out):
        return _run(handover, data, settings, out, progress, share)


def _run(
    handover: Path, data: shards.DataConfig, settings: Settings, out: Path, progress: Progress, share: images.Share
) -> Summary:
    certified = read(settings.certificate) if settings.certificate else None
    settings = settings.answered_by(certified) if certified else settings
    nonce = certified.recorded if certified else nonce_of(settings.nonce, out / ROWS, share.parts)
    settings = replace(settings, nonce=nonce.text)
    if share.first % settings.block:
        raise UserError(
            f"first={share.first} must be a multiple of block={settings.block}: images are attacked in blocks"
        )
    listed = images.image_list(data, settings.images, settings.block, share.first)
    subject = subject_of(handover, listed)
    proved = certified.of(subject, listed.images) if certified else None
    make = partial(EvaluateBlock, settings=settings, out=out, proved=proved)
    own = make(handover)  # refuses invalid requests before anything is written
    settings = own.settings
    subject |= _asked(settings) | nonce.said()
    records.require_rows(out / EVALUATION, ROWS)
    rows = runner.resume(out / ROWS, subject, listed, row_schema_of(settings, own.attacks), settings.block)
    rows = rows.with_parts(share.parts)
    flags = _flags(own, listed, {"images": settings.check_images, "subject": subject}, out / CHECKS)
    table = rows.complete(own, handover, make, settings.crew, progress)
    records.write_parquet(out / TABLE, table)
    records.write_csv(out / CSV, table)
    summary = _summary(table, subject, own, flags) | records.digests(out, ROWS, TABLE, CSV)
    for threat, entry in robustbench.entries(summary, own.attacks):
        records.write_json(out / f"robustbench_{threat}.json", entry)
    tables.bars(summary, out / BARS)
    write_whole(out / CARD, tables.card(summary))
    records.write_json(out / EVALUATION, summary)
    return summary


def _asked(settings: Settings) -> Summary:
    """Return the settings that determine the rows, besides weights and images."""
    return {
        "protocol": settings.protocol,
        "attacks": {name: dict(options) for name, options in settings.attacks.items()},
        "method": settings.method,
        "norm": settings.norm,
        "served_dtype": settings.served_dtype if settings.method else None,
        "nonce": settings.nonce,
        "block": settings.block,
        "seed": settings.seed,
        "attack_dtype": settings.attack_dtype,
    }


def _flags(own: EvaluateBlock, listed: images.ImageList, asked: Summary, path: Path) -> list[checks.Flag]:
    """Check the first `images` correct images, in the ball of the protocol's first attack that has one.

    The result is kept for a second start with the same subject and settings.
    """
    asked = json.loads(json.dumps(asked))
    known = read_json(path) if path.exists() else {}
    if not isinstance(known, dict) or {key: known.get(key) for key in asked} != asked:
        ball = next(((attack.norm, attack.eps) for attack in own.attacks.values() if attack.eps), DEFAULT_BALL)
        correct = _correct(own, listed, asked["images"])
        flags = checks.of_model(checks.Case(own.attacked, *correct, *ball))
        records.write_json(path, known := {**asked, "flags": [vars(flag) for flag in flags]})
    return [checks.Flag(**flag) for flag in known["flags"]]


def _correct(own: EvaluateBlock, listed: images.ImageList, count: int) -> tuple[Tensor, Tensor]:
    """Return the first `count` correctly classified images, or sentences of one length, and their labels."""
    found: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
    for keys, images_BCHW, labels in listed.batches():
        for _, x, y in by_length(own.model, keys, images_BCHW.to(own.device), labels.to(own.device)):
            correct = own.model(x).argmax(1) == y
            found.setdefault(x.shape[1:], []).append((x[correct], y[correct]))
        if max(map(_held, found.values())) >= count:
            break
    x, y = (torch.cat(parts)[:count] for parts in zip(*max(found.values(), key=_held), strict=True))
    return x, y


def _held(parts: list[tuple[Tensor, Tensor]]) -> int:
    return sum(len(x) for x, _ in parts)


def _summary(table: pd.DataFrame, subject: Summary, own: EvaluateBlock, flags: list[checks.Flag]) -> Summary:
    """Return the content of evaluation.json: accuracies in [0,1] over the same images."""
    attacks, method = own.attacks, own.settings.method
    return {
        **subject,
        **model_facts(own.config),
        "torch": torch.__version__,
        **image_facts(table, method),
        **({"numerics": chances(table)} if method else {}),
        "accuracy": accuracies.by_attack(table, attacks),
        "worst_case": accuracies.by_ball(table, attacks),
        "found_within_certified_radius": accuracies.within_radius(table, attacks, method, own.settings.norm),
        "flags": [vars(flag) for flag in [*flags, *checks.of_table(table, attacks)]],
    }
