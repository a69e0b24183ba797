"""The outcomes of the certify stage: clean, attacked and certified answers for the same images, one row per image.

For every eps the three must be nested: a certified image survives every attack, and a surviving image is correct. A
certified image whose class an attack changes would refute the certificate, so it stops the run.
"""

import copy
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from certify.api import named_certifier, outside_inference_mode, radius_given, radius_of
from certify.methods import AUTO
from certify.rows.draws import draws
from certify.rows.row_schema import Kind, Row, RowSchema, amount, chance, flag, one_of, perhaps, real, whole
from certify.shared.ball import L2
from certify.shared.breakdown import QUANTITIES, columns
from certify.shared.certificate import Analysis, Certificate, Certifier, Explained, UnsoundCertificate
from certify.stage.substitutions import COLUMN
from certizoo import UserError
from certizoo.attacks import AttackConfig
from certizoo.inputs import batch_given

if TYPE_CHECKING:
    import pandas as pd

POSITION_ONLY = "correct_without_content"  # column: correct with all attention scores set to 0
CERTIFIED, NOT_CERTIFIED, UNKNOWN = "certified", "not certified", "unknown"
DEFAULT_ATTACK = AttackConfig(norm="l2", steps=40, loss="margin", stop_when_fooled=True)


def status(certificate: Certificate) -> list[str]:
    """Return one answer per image; an overflowing bound is `unknown`, never `certified`."""
    pairs = zip(certificate.certified_B.tolist(), certificate.unknown_B.tolist(), strict=True)
    return [CERTIFIED if yes else UNKNOWN if open_ else NOT_CERTIFIED for yes, open_ in pairs]


@outside_inference_mode
def evaluate(
    model: nn.Module,
    images_BCHW: Tensor,
    labels_B: Tensor,
    *,
    eps: Sequence[float],
    method: str = AUTO,
    attack: AttackConfig = DEFAULT_ATTACK,
    keys: Sequence[str] | None = None,
    nonce: str | None = None,
    norm: str = L2,
) -> "pd.DataFrame":
    """Return clean, attacked and certified answers for the same images: one row per image, columns as in `rows_of`.

    images (B, C, H, W) in [0,1], labels (B,); eps: radii in [0,1] pixel space, of certificates and attack alike; keys
    default to 0..B-1; nonce and norm: those of `certify.api.certifier`.

    Raises NoRule, UserError for an unknown method, UnsoundCertificate.
    """
    images, labels = batch_given(images_BCHW, labels_B)
    method, certifier = named_certifier(model, method, nonce, norm, (images, labels))
    served = copy.deepcopy(model).eval()
    weight = next(served.parameters())
    images, labels = images.to(weight), labels.to(weight.device)
    grid = _grid(eps, norm)
    names = [str(i) for i in range(len(labels))] if keys is None else list(keys)
    if len(names) != len(labels):
        raise UserError(f"there are {len(names)} keys for {len(labels)} images; pass one key per image")
    if not isinstance(attack, AttackConfig):
        raise UserError(f"attack is a {type(attack).__name__}; pass an attacks.AttackConfig")
    import pandas as pd  # imported here: it takes 0.2 s, and training ranks do not need it

    return pd.DataFrame(rows_of(certifier, served, names, images, labels, method=method, eps_grid=grid, attack=attack))


def answers(analysis: Analysis, eps_grid: Sequence[float], search_radii: bool) -> tuple[Tensor, dict[float, list[str]]]:
    """Return the radii (B,), and the statuses at every eps.

    An image is certified within its radius, so that only a larger eps is asked: from the largest one down. Radii are
    the largest of what a search, if any, and these answers prove.
    """
    radius_B = radius_of(analysis) if search_radii else torch.zeros_like(analysis.clean.margin_BJ[:, 0])
    statuses = {}
    for eps in sorted(eps_grid, reverse=True):
        found = analysis.at(torch.where(radius_B >= eps, 0.0, eps))
        statuses[eps] = status(found)
        radius_B = torch.where(found.certified_B, radius_B.clamp_min(eps), radius_B)
    return radius_B, statuses


def _grid(eps: Sequence[float], norm: str) -> list[float]:
    """Return the radii. Raises UserError unless they are distinct and above 0."""
    if isinstance(eps, str) or not isinstance(eps, Iterable):
        raise UserError(f"eps={eps!r} must be a list of radii, such as (0.02, 0.1)")
    grid = [float(radius_given(one, 1, norm)) for one in eps]
    if not grid or len({f"{one:g}" for one in grid}) < len(grid):
        raise UserError(f"eps={grid} must hold at least one radius, and each one once")
    return grid


def rows_of(
    certifier: Certifier,
    served: nn.Module,
    keys: Sequence[str],
    images_BCHW: Tensor,
    labels_B: Tensor,
    *,
    method: str,
    eps_grid: Sequence[float],
    attack: AttackConfig,
    search_radii: bool = True,
    explain_at: float | None = None,
) -> list[Row]:
    """Return one row per image with its clean, attacked and certified answers.

    Columns: {key, label, prediction, correct, margin, radius.<method>, certified.<eps>, pgd.<eps>, seconds, failure}.

    `certifier` is that of `method`; `served` is the model as it is served (float32), which is attacked; images are (B,
    C, H, W) in [0,1]. The attack runs at every eps of the grid in the certifier's norm. Without `search_radii` a radius
    is the largest eps of the grid that is certified, which takes less time. With `explain_at`, an eps, rows
    also hold the cost of every step of the model there, if the method has a breakdown: `growth.<step>` or
    `share.<step>` (certificate.Breakdown). Raises UnsoundCertificate.
    """
    start = time.perf_counter()
    analysis = certifier.analyse(images_BCHW, labels_B)
    radius_B, statuses = answers(analysis, eps_grid, search_radii)
    seconds = (time.perf_counter() - start) / len(keys)
    costs: list[dict[str, float]] = [{} for _ in keys]
    if explain_at is not None and isinstance(analysis, Explained):
        costs = columns(analysis.breakdown(explain_at)) or costs
    ball = replace(attack, norm=analysis.ball.norm)
    survived = {eps: survives(served, keys, images_BCHW, labels_B, replace(ball, eps=eps)) for eps in eps_grid}
    for eps in eps_grid:
        confirmed(keys, [answer == CERTIFIED for answer in statuses[eps]], survived[eps], method, eps)
    clean = analysis.clean
    margin_B = clean.margin_BJ.amin(-1)
    rows = []
    for i, key in enumerate(keys):
        row: Row = {
            "key": key,
            "label": int(labels_B[i]),
            "prediction": int(clean.prediction_B[i]),
            "correct": bool(clean.correct_B[i]),
            "margin": float(margin_B[i]),
            f"radius.{method}": float(radius_B[i]),
            "seconds": seconds,
            "failure": analysis.failure,
        }
        for eps in eps_grid:
            row[f"certified.{eps:g}"] = statuses[eps][i]
            row[f"pgd.{eps:g}"] = bool(survived[eps][i]) and row["correct"]
        rows.append(row | costs[i])
    return rows


def row_schema_of(method: str, eps_grid: Sequence[float]) -> RowSchema:
    """Return the schema of the rows of `rows_of` with their optional columns.

    `served_difference` is always required; POSITION_ONLY is there where attention has scores, and COLUMN for sentences.
    """
    answers = {f"certified.{eps:g}": one_of(CERTIFIED, NOT_CERTIFIED, UNKNOWN) for eps in eps_grid}
    needed = {
        "prediction": whole,
        "correct": flag,
        "margin": real,
        f"radius.{method}": amount,
        "seconds": amount,
        "failure": chance,
        "served_difference": amount,
        **answers,
        **{f"pgd.{eps:g}": flag for eps in eps_grid},
    }
    costs: dict[str, Kind] = {f"{quantity}.": perhaps(real) for quantity in QUANTITIES}

    def contradiction(row: Row) -> str | None:
        """Check that radii, certificates, attacks and clean answers are nested."""
        if row["correct"] and row["prediction"] != row["label"]:
            return f"is correct with prediction {row['prediction']} and label {row['label']}"
        if row["correct"] and not row["margin"] > 0:
            return f"is correct with a margin of {row['margin']}"
        for eps in eps_grid:
            certified, survives = row[f"certified.{eps:g}"] == CERTIFIED, row[f"pgd.{eps:g}"]
            if row[f"radius.{method}"] >= eps and not certified:
                return f"has radius {row[f'radius.{method}']} but is not certified at {eps:g}"
            if certified > survives or survives > row["correct"]:
                return f"is certified at {eps:g}, but an attack succeeds or the prediction is wrong"
        return None

    return RowSchema(needed, costs | {POSITION_ONLY: flag, COLUMN: chance}, contradiction)


def confirmed(keys: Sequence[str], certified_B: list[bool], survives_B: Tensor, method: str, eps: float) -> None:
    """Raise UnsoundCertificate if an image is certified and does not survive."""
    for key, certified, survived in zip(keys, certified_B, survives_B.tolist(), strict=True):
        if certified and not survived:
            raise UnsoundCertificate(
                f"image {key} is certified by {method} at eps {eps:g} but an attack of that size changes its class"
            )


def survives(
    model: nn.Module, keys: Sequence[str], images_BCHW: Tensor, labels_B: Tensor, attack: AttackConfig
) -> Tensor:
    """Return which images the model still classifies correctly after the attack: (B,) bool.

    The random start of an image depends on its key alone, so neither `batch_size` nor a resumed run changes it.
    """
    adversarial_BCHW = attack.run(model, images_BCHW, labels_B, draws(keys))
    with torch.no_grad():
        return model(adversarial_BCHW).argmax(-1) == labels_B
