"""Objectives of a search: accuracies of the certificate, written NAME or NAME@EPS.

`clean_acc`, `pgd_acc@0.1` (attacked: an upper bound of the robust accuracy), `certified_acc@0.1` (a lower bound). While
a trial trains, the trainer certifies a few images (trainers/steps/certify_probe.py). A trial that is stopped early
counts with the last of these figures.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from certizoo import UserError

COMPARED = "compared"  # key of the first objective in a trial's report
KINDS = {"certified_acc": "certified", "pgd_acc": "pgd"}  # name -> key in certificate.json


@dataclass(frozen=True)
class Objective:
    """`name` at the radius `eps`, in certify.norm, as typed ('' for clean_acc). All are maximised."""

    name: str
    eps: str = ""

    @property
    def key(self) -> str:
        return f"{self.name}@{self.eps}" if self.eps else self.name

    def radius(self, grid: Sequence[float]) -> float:
        """Return the radius of `grid` that `eps` abbreviates (0.141 for 36/255); `eps` itself if there is none."""
        return next((eps for eps in grid if math.isclose(eps, float(self.eps), rel_tol=0.005)), float(self.eps))

    def seen(self, row: Mapping[str, float]) -> float | None:
        """Return the figure of an evaluation by the trainer, called NAME.EPS there; None if it is missing."""
        radii = [float(key.removeprefix(f"{self.name}.")) for key in row if key.startswith(f"{self.name}.")]
        return row.get(f"{self.name}.{self.radius(radii):g}" if self.eps else self.name)

    def compared(self, row: Mapping[str, float]) -> float | None:
        """Return the figure that schedulers compare: `seen`, or `certified_near` for certified shares.

        `certified_near` changes smoothly (certify/stage/probe_model.py). A share of few images moves by whole images,
        so that chance would rank the trials.
        """
        if self.name == "certified_acc":
            return replace(self, name="certified_near").seen(row)
        return self.seen(row)

    def value(self, certificate: Mapping[str, Any]) -> float:
        """Return the accuracy in [0, 1] that certificate.json states."""
        if not self.eps:
            return float(certificate["clean"])
        radius = self.radius(certificate["eps"])
        return float(certificate["accuracy"][f"{radius:g}"][KINDS[self.name]])


def parse(text: str) -> Objective:
    """Parse `certified_acc@0.141`, `pgd_acc@0.1` or `clean_acc`."""
    name, _, eps = text.partition("@")
    if text == "clean_acc":
        return Objective(name)
    try:
        right = name in KINDS and float(eps) > 0
    except ValueError:
        right = False
    if not right:
        raise UserError(
            f"metric {text!r}: write certified_acc@EPS, pgd_acc@EPS (a radius in certify.norm) or clean_acc"
        )
    return Objective(name, eps)


def grid_with(grid: Sequence[float], objectives: Sequence[Objective]) -> list[float]:
    """Return the radii to certify: those of `grid` and those of the objectives."""
    return sorted({*grid, *(objective.radius(grid) for objective in objectives if objective.eps)})


def early(objectives: Sequence[Objective], row: Mapping[str, float]) -> dict[str, float]:
    """Return the known objectives of a trial that still trains."""
    seen = {objective.key: objective.seen(row) for objective in objectives}
    return {key: value for key, value in seen.items() if value is not None}


def with_attacked(objectives: Sequence[Objective]) -> tuple[Objective, ...]:
    """Return the objectives, each certified accuracy with the attacked one at the same radius."""
    pairs = [(one, Objective("pgd_acc", one.eps)) if one.name == "certified_acc" else (one,) for one in objectives]
    return tuple(dict.fromkeys(objective for pair in pairs for objective in pair))
