"""Choose and order versions by their tags: `registry list --where dataset=cifar10 --sort certified_acc.0.141`."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence

from certizoo import UserError
from certizoo.nearest import choices
from certizoo.registry.browse import Version
from certizoo.registry.versions import version_tags

OWN = ("name", "version", "alias")  # keys that are not tags
CONDITION = re.compile(r"([^=<>!]+?)\s*(!=|>=|<=|=)\s*(.+)")


def select(found: Iterable[Version], where: Sequence[str] = (), sort: str | None = None) -> list[Version]:
    """Return the versions that meet every condition, ordered by the tag `sort`.

    Conditions are `dataset=cifar10`, `certified_acc.0.1>=0.5`, also != and <=. Numbers are sorted from the best, texts
    alphabetically, versions without the tag last.
    """
    kept = list(filter(meets(where), found))
    if sort is None:
        return kept
    if not any(fact(version, sort) for version in kept) and kept:
        have = sorted({key for version in kept for key in version.tags})
        raise UserError(f"no version has {sort!r}; {choices(sort, have)}")
    return sorted(kept, key=lambda version: _order(fact(version, sort)))


def meets(where: Sequence[str]) -> Callable[[Version], bool]:
    """Return the predicate that every condition holds."""
    conditions = [_condition(text) for text in where]
    return lambda version: all(holds(version) for holds in conditions)


def texts(where: Sequence[str]) -> dict[str, str]:
    """Return the conditions KEY=TEXT, which a server can look up; numbers may be written in several ways."""
    pairs = [match.groups() for text in where if (match := CONDITION.fullmatch(text.strip()))]
    return {key: wanted for key, sign, wanted in pairs if sign == "=" and _number(wanted) is None}


def tags_named(key: str, found: Iterable[Version]) -> set[str]:
    """Return the tags that `fact` may read for the key."""
    return {tag for version in found for tag in version.tags if tag == key or _same_radius(tag, key)}


def fact(version: Version, key: str) -> str:
    """Return a tag, or name, version, alias; '' if there is none. `certified_acc.0.141` finds the tag of 36/255."""
    own = dict(zip(OWN, (version.name, version.version, " ".join(version.aliases)), strict=True))
    known = own | version.tags
    return known[key] if key in known else next((v for tag, v in version.tags.items() if _same_radius(tag, key)), "")


def _condition(text: str) -> Callable[[Version], bool]:
    match = CONDITION.fullmatch(text.strip())
    if match is None:
        raise UserError(f"{text!r} is not a condition; write KEY=VALUE, KEY!=VALUE, KEY>=NUMBER or KEY<=NUMBER")
    key, sign, wanted = match.groups()
    if sign in ("=", "!="):
        return lambda version: _equal(fact(version, key), wanted) == (sign == "=")
    limit = _number(wanted)
    if limit is None:
        raise UserError(f"{text!r}: {wanted!r} is not a number")
    compare = operator.ge if sign == ">=" else operator.le

    def holds(version: Version) -> bool:
        value = _number(fact(version, key))
        return value is not None and compare(value, limit)

    return holds


def _equal(have: str, wanted: str) -> bool:
    """Return True for the same text, number, or one word of several (aliases)."""
    number = _number(wanted)
    return have == wanted or wanted in have.split() or (number is not None and _number(have) == number)


def _order(value: str) -> tuple[int, float, str]:
    number = _number(value)
    return (2 if not value else 0 if number is not None else 1, -(number or 0.0), value)


def _same_radius(tag: str, key: str) -> bool:
    """Return True for the same name and norm, and radii within half a percent.

    `certified_acc.0.141` is `certified_acc.0.141176`, and `certified_acc.linf.0.0157` is of 4/255.
    """
    (*name, radius), (*wanted, typed) = version_tags.parts(tag), version_tags.parts(key)
    a, b = _number(radius), _number(typed)
    return name == wanted and a is not None and b is not None and math.isclose(a, b, rel_tol=0.005)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value
