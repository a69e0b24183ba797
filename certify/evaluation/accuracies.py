"""Accuracies from the rows of an evaluation: attack by attack, and the worst case by threat model."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from certify.rows.intervals import wilson
from certizoo.attacks.attack import Attack

Accuracy = dict[str, Any]


def by_attack(table: pd.DataFrame, attacks: Mapping[str, Attack]) -> dict[str, Accuracy]:
    """Return the accuracy under each attack, by its name.

    {name: norm, eps, accuracy and its Wilson interval, certified (share proved against the attack's whole ball, None if
    it has no ball), median_l2 of the points that fool (None if there are none), seconds per image}.
    """
    return {name: _of(table, name, attack) for name, attack in attacks.items()}


def by_ball(table: pd.DataFrame, attacks: Mapping[str, Attack]) -> list[Accuracy]:
    """Return the accuracy in each threat model that two or more attacks share.

    Entries are {norm, eps, attacks, accuracy (survives all of them), interval}.
    """
    balls: dict[tuple[str, float], list[str]] = {}
    for name, attack in attacks.items():
        if attack.eps is not None:
            balls.setdefault((attack.norm, attack.eps), []).append(name)
    return [
        {"norm": norm, "eps": eps, "attacks": names} | _share(table[[f"survives.{name}" for name in names]].all(axis=1))
        for (norm, eps), names in balls.items()
        if len(names) > 1
    ]


def within_radius(table: pd.DataFrame, attacks: Mapping[str, Attack], method: str | None, norm: str) -> int:
    """Return the number of points that fool within a certified radius, over all images and attacks."""
    if method is None:
        return 0
    return int(sum((table[f"{norm}.{name}"] <= table[f"radius.{method}"]).sum() for name in attacks))


def _of(table: pd.DataFrame, name: str, attack: Attack) -> Accuracy:
    median = float(table[f"l2.{name}"].astype(float).median())
    proved = table.get(f"certified.{name}")
    return {
        "norm": attack.norm,
        "eps": attack.eps,
        **_share(table[f"survives.{name}"]),
        "certified": None if proved is None else _share(proved),
        "median_l2": None if math.isnan(median) else median,
        "seconds_per_image": float(table[f"seconds.{name}"].mean()),
    }


def _share(holds: "pd.Series[bool]") -> Accuracy:
    share = float(holds.mean())
    return {"accuracy": share, "interval": list(wilson(share, len(holds)))}
