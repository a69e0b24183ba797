"""The entries of the leaderboard: every file of `leaderboard/`, and the questions (data set, norm) that they answer."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from certizoo.norms import NAMES as NORMS
from docs import ROOT

FOLDER = ROOT / "leaderboard"
DATASETS = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "tinyimagenet": "Tiny ImageNet",
    "imagenet": "ImageNet",
    "imagenette": "Imagenette",
    "mnist": "MNIST",
    "digits": "Digits",
}
FRACTIONS = {n / 255: f"{n:g}/255" for n in (0.5, 1, 2, 4, 8, 16, 36, 72, 108)}
NEAR = 5e-5  # radii closer than this are one


@dataclass(frozen=True)
class Point:
    """Shares of all images at one radius, in per cent; None if not measured."""

    eps: float
    certified: float | None
    attacked: float | None
    attack: str


@dataclass(frozen=True)
class Entry:
    """One file. Missing values are ''."""

    file: str
    said: Mapping[str, Any]

    def text(self, key: str) -> str:
        value = self.said.get(key)
        return "" if value is None else " ".join(str(value).split())

    @property
    def name(self) -> str:
        return self.text("name") or self.file

    @property
    def place(self) -> str:
        """Return a name without special meaning in a path or link."""
        return f"entry-{simple(self.file)}"

    @property
    def published(self) -> bool:
        """Return True if the figures are taken from a publication."""
        return bool(self.said.get("published"))

    @property
    def clean(self) -> float | None:
        """Return the clean accuracy in per cent."""
        return number(self.said.get("clean"))

    def at(self, norm: str, eps: float) -> Point | None:
        """Return the entry's point at this radius."""
        return next((point for point in self.curve(norm) if abs(point.eps - eps) < NEAR), None)

    def certified(self, norm: str, eps: float) -> float:
        """Return what is certified at this radius; -1 if unknown."""
        there = self.at(norm, eps)
        return -1.0 if there is None or there.certified is None else there.certified

    def curve(self, norm: str) -> list[Point]:
        """Return the points by growing radius."""
        found = (self.said.get("curves") or {}).get(norm) or {}
        points = [
            Point(float(f"{float(eps):.5g}"), number(at.get("certified")), number(at.get("attacked")), _attack(at))
            for eps, at in found.items()
        ]
        return sorted(points, key=lambda point: point.eps)


@dataclass(frozen=True)
class Question:
    """A data set and a norm, with its entries: the best at the headline first, those without a figure there last."""

    dataset: str
    norm: str
    headline: float
    radii: tuple[float, ...]  # the columns of its table
    entries: tuple[Entry, ...]

    @property
    def title(self) -> str:
        return f"{DATASETS.get(self.dataset, self.dataset)}, {NORMS[self.norm]}"

    @property
    def place(self) -> str:
        return f"{simple(self.dataset.lower())}-{self.norm}"


RADII = 4


@cache
def entries(folder: Path = FOLDER) -> tuple[Entry, ...]:
    """Return every file of the folder but its schema; nothing if the folder does not exist."""
    paths = [path for path in sorted(folder.glob("*.json")) if path.stem != "schema"]
    return tuple(Entry(path.stem, json.loads(path.read_text())) for path in paths)


def questions(found: Iterable[Entry]) -> list[Question]:
    """Return the questions that these entries answer, known data sets first."""
    asked: dict[tuple[str, str], list[Entry]] = {}
    for entry in found:
        for norm in NORMS:
            if entry.curve(norm):
                asked.setdefault((entry.text("dataset"), norm), []).append(entry)
    order = [*DATASETS, *sorted({dataset for dataset, _ in asked} - set(DATASETS))]
    return [_question(*key, asked[key]) for key in sorted(asked, key=lambda key: (order.index(key[0]), key[1]))]


def _question(dataset: str, norm: str, found: list[Entry]) -> Question:
    """Return the question; its headline is the radius of most entries."""
    radii = _columns([{p.eps for p in entry.curve(norm) if p.certified is not None} for entry in found])
    headline = radii[0] if radii else 0.0
    ranked = sorted(found, key=lambda entry: (-entry.certified(norm, headline), entry.name))
    return Question(dataset, norm, headline, tuple(sorted(radii)), tuple(ranked))


def _columns(having: Sequence[set[float]]) -> list[float]:
    """Return radii until every entry has a figure at one of them, then those of most entries, RADII at most."""
    counts, columns = Counter(eps for radii in having for eps in radii), list[float]()
    while counts and len(columns) < RADII:
        bare = Counter(eps for radii in having if not radii & set(columns) for eps in radii)
        columns.append(max(counts, key=lambda eps: (bare[eps], counts[eps], -eps)))
        del counts[columns[-1]]
    return columns


def eps_name(eps: float) -> str:
    """Format 0.1411764705882353 as '36/255'."""
    near = [name for value, name in FRACTIONS.items() if abs(eps - value) < NEAR]
    return near[0] if near else f"{eps:g}"


def simple(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text)


def number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _attack(point: Mapping[str, Any]) -> str:
    return str(point.get("attack") or "")
