"""The schema of rows: each row belongs to the image in its place of the list, and has columns of the right type.

Rows are checked when they are computed and when they are read again, hence before anything is summed up.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Row = dict[str, Any]
Kind = Callable[[object], bool]


class Listed(NamedTuple):
    """An image of the list, by its name."""

    key: str
    label: int


def whole(value: object) -> bool:
    return type(value) is int


def flag(value: object) -> bool:
    return type(value) is bool


def real(value: object) -> bool:
    """Check for a float, or an integer that JSON writes for one; it may be infinite or NaN."""
    return type(value) in (int, float)


def amount(value: object) -> bool:
    """Check for a finite number >= 0."""
    return isinstance(value, int | float) and type(value) is not bool and 0 <= value < math.inf


def chance(value: object) -> bool:
    return amount(value) and isinstance(value, int | float) and value <= 1


def perhaps(kind: Kind) -> Kind:
    """Return a check for that kind or None."""
    return lambda value: value is None or kind(value)


def one_of(*values: str) -> Kind:
    return lambda value: isinstance(value, str) and value in values


def no_contradiction(row: Row) -> str | None:
    return None


@dataclass(frozen=True)
class RowSchema:
    """The columns of a command besides key and label.

    `needed` are those of every row, by name; `further` those that a row may have, by prefix. `contradiction` describes
    which values of a row cannot be true together.
    """

    needed: Mapping[str, Kind] = field(default_factory=dict)
    further: Mapping[str, Kind] = field(default_factory=dict)
    contradiction: Callable[[Row], str | None] = no_contradiction

    def fault(self, rows: Sequence[Row], images: Sequence[Listed], start: int = 0) -> tuple[int, str] | None:
        """Return (place, fault) of the first row, from `start` on, that does not match its image."""
        for place, row in enumerate(rows[start:], start):
            if place >= len(images):
                return place, f"is one more than the {len(images)} images"
            if said := self._of_image(row, images[place]):
                return place, said
        return None

    def _of_image(self, row: object, image: Listed) -> str | None:
        if not isinstance(row, dict):
            return "is not a row of columns"
        if (row.get("key"), row.get("label")) != image or not whole(row.get("label")):
            return f"is of image {row.get('key')} with label {row.get('label')}, not of {image.key} with {image.label}"
        for name, kind in self.needed.items():
            if name not in row or not kind(row[name]):
                return f"has {name}={row.get(name)}"
        for name in row.keys() - self.needed.keys() - {"key", "label"}:
            kind = next((kind for start, kind in self.further.items() if name.startswith(start)), lambda value: False)
            if not kind(row[name]):
                return f"has {name}={row[name]}"
        return self.contradiction(row)
