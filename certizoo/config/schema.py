"""Typed sections of everything that people write: configurations, search spaces, protocols, numbers of commands.

A section is a frozen dataclass below `Section`. The annotation of a field states its type and its range:

    lr: Annotated[float, Gt(0)]
    name: Annotated[str, OneOf("adamw", "sgd", "muon")]

pydantic checks and converts a value whenever a section is made, from a file, a command line or Python, so that
`enabled=off` is False and `enabled=maybe` an error. `words` describes an annotation; errors and `--help` use it.
"""

import argparse
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function, no_info_before_validator_function

from certizoo.errors import UserError
from certizoo.nearest import unknown
from certizoo.text import shown

__all__ = [
    "Count", "FilePath", "Ge", "Gt", "Le", "Lt", "Matching", "MinLen", "NonNegative", "OnDisk", "OneOf", "PathText",
    "Port", "Positive", "Section", "Share", "Source", "Text", "Whole", "WrongValue", "argument", "as_path", "checked",
    "hints", "section_of", "typed_values", "words", "words_of", "written",
]  # fmt: skip

S = TypeVar("S", bound="Section")
Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Port = Annotated[int, Ge(0), Lt(2**16)]  # 0: any free port
Share = Annotated[float, Ge(0), Le(1)]
Text = Annotated[str, Field(coerce_numbers_to_str=True)]  # name=7 is a name
LARGEST = 2**63  # whole number
LONGEST_PATH, LONGEST_NAME = 4000, 255  # characters, and bytes between two slashes

_LAX = ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)
_NAMES: dict[Any, str] = {
    float: "a number", int: "a whole number", bool: "true or false", str: "text", Path: "a path", type(None): "null",
    Any: "any value",
}  # fmt: skip
_LIMITS = {"gt": "above {}", "ge": "at least {}", "lt": "below {}", "le": "at most {}"}


class Restriction:
    """Annotates the values that a field may have; `words` describe them."""

    words: str

    def allows(self, value: Any) -> bool:
        raise NotImplementedError

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._require, handler(kind))

    def _require(self, value: Any) -> Any:
        if not self.allows(value):
            raise ValueError
        return value


class OneOf(Restriction):
    """Allows these values only."""

    def __init__(self, *values: object) -> None:
        named = ", ".join(map(written, values))
        self.values, self.words = values, named if len(values) == 1 else f"one of {named}"

    def allows(self, value: Any) -> bool:
        return value in self.values


class Matching(Restriction):
    """Allows text that matches a regular expression, which `words` describe."""

    def __init__(self, pattern: str, words: str) -> None:
        self.pattern, self.words = pattern, words

    def allows(self, value: Any) -> bool:
        return re.fullmatch(self.pattern, value, re.ASCII) is not None


class OnDisk(Restriction):
    """Allows names that a file or folder can have, and replaces `~` by the home folder."""

    def __init__(self, words: str = "a path") -> None:
        self.words = words

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_before_validator_function(self._expanded, handler(kind))  # Path("") would be the current folder

    def allows(self, value: str) -> bool:
        parts = os.fsencode(value).split(b"/")  # a lone surrogate is a ValueError
        short = len(value) <= LONGEST_PATH and max(map(len, parts)) <= LONGEST_NAME
        return bool(value.strip()) and value.isprintable() and short and not value.startswith("~")

    def _expanded(self, value: Any) -> Any:
        if not isinstance(value, str | Path):
            return value
        return self._require(os.path.expanduser(value))  # without such a home, `~name` stays


PathText = Annotated[str, OnDisk()]
FilePath = Annotated[Path, OnDisk()]
Source = Annotated[str, OnDisk("a path, URL or name")]


class WrongValue(UserError):
    """A value of another type or outside its range; `key` is relative to its section."""

    def __init__(self, key: str, value: object, wanted: str) -> None:
        super().__init__(f"{key}={shown(value)} is invalid; give {wanted}")
        self.parts = key, value, wanted

    def within(self, section: str) -> "WrongValue":
        """Return the error with the key as the whole configuration names it."""
        key, value, wanted = self.parts
        return WrongValue(f"{section}.{key}" if section else key, value, wanted)


@dataclass(frozen=True)
class Section:
    """Checks and converts its fields by their annotations. Raises WrongValue, which is a UserError."""

    def __post_init__(self) -> None:
        for key, hint in hints(type(self)).items():
            object.__setattr__(self, key, checked(key, getattr(self, key), hint))


def hints(section: Any) -> dict[str, Any]:
    """Return the annotations of the fields of a section, ranges included."""
    return _hints(section)


@cache
def _hints(section: Any) -> dict[str, Any]:
    found = get_type_hints(section, include_extras=True)
    return {field.name: found[field.name] for field in fields(section)}


def section_of(cls: type[S], said: object, name: str = "", where: str | None = None) -> S:
    """Return the section `name` of a configuration from its keys; `where` lists the known keys for the error.

    Raises:
        UserError: the section is not a mapping, or a key or value is unknown, missing or wrong.
    """
    if not isinstance(said, Mapping):
        raise UserError(
            f"{name}={shown(said)} is a section of the configuration; set its keys, such as {_example(cls, name)}"
        )
    keys = {_dotted(name, key): hint for key, hint in hints(cls).items()}
    values = {}
    for key, value in said.items():
        if (dotted := _dotted(name, str(key))) not in keys:
            raise unknown("config key", dotted, list(keys), where)
        hint = keys[dotted]
        kind = _section_in(hint)
        nested = kind is not None and not isinstance(value, kind) and (value is not None or hint is kind)
        values[str(key)] = section_of(kind, value, dotted, where) if kind and nested else value
    for field in fields(cls):
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise UserError(f"{_dotted(name, field.name)} is missing; give {words(keys[_dotted(name, field.name)])}")
    try:
        return cls(**values)
    except WrongValue as error:
        raise error.within(name) from None


def typed_values(cls: type[Section], said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given keys of a whole configuration with every value in its own type, as JSON and YAML know them."""
    return _as_written(asdict(section_of(cls, said)), said)


def _as_written(typed: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain_value(typed[key], said[key]) for key in said}


def _plain_value(value: Any, said: Any) -> Any:
    if isinstance(value, Mapping) and isinstance(said, Mapping):
        return _as_written(value, said)
    return list(value) if isinstance(value, tuple) else value


def checked(key: str, value: object, hint: Any) -> Any:
    """Return the value as its annotation has it. Raises WrongValue."""
    if (kind := _section_in(hint)) and isinstance(value, kind):
        return value
    try:
        found = _adapter(hint).validate_python(value)
    except (ValueError, OverflowError):  # pydantic's ValidationError is a ValueError
        raise WrongValue(key, value, words(hint)) from None
    huge = isinstance(found, int) and abs(found) >= LARGEST
    if huge or (_booleans(value) and not _booleans(found)):  # pydantic takes True as 1
        raise WrongValue(key, value, words(hint))
    return found


def argument(hint: Any) -> Callable[[str], Any]:
    """Return argparse's `type` for an option with this annotation."""

    def parse(text: str) -> Any:
        try:
            return checked("", text, hint)
        except WrongValue:
            raise argparse.ArgumentTypeError(f"{text!r} is invalid; give {words(hint)}") from None

    return parse


as_path = argument(FilePath)


def words_of(cls: type[Section], name: str = "") -> dict[str, str]:
    """Return the allowed values of every key of a section, {"train.epochs": "a whole number of at least 1"}."""
    found: dict[str, str] = {}
    for key, hint in hints(cls).items():
        dotted, kind = _dotted(name, key), _section_in(hint)
        found |= words_of(kind, dotted) if kind else {dotted: words(hint)}
    return found


def words(hint: Any) -> str:
    """Describe the values that an annotation allows: "a number above 0 and of at most 1, or null"."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _words_in_range(inside[0], inside[1:])
    if origin in (Union, types.UnionType):
        *first, last = sorted(map(words, inside), key=lambda text: text == "null")
        return f"{', '.join(first)}, or {last}"
    if origin in (tuple, list, Sequence):
        one = re.sub("number|path", r"\g<0>s", words(inside[0]).removeprefix("a "), count=1)
        return f"a list of {one}" if origin is list or inside[-1] is ... else f"{len(inside)} {one}, as [A,B]"
    if origin in (dict, Mapping) or origin is not None:
        return "a mapping {KEY: VALUE}"
    return _NAMES.get(hint) or f"a section {hint.__name__}"


def _words_in_range(kind: Any, limits: Sequence[Any]) -> str:
    if described := [limit.words for limit in limits if isinstance(limit, Restriction)]:
        return described[0]
    bounds = [text.format(getattr(one, key)) for key, text in _LIMITS.items() for one in limits if hasattr(one, key)]
    between = " of " if bounds and bounds[0].startswith("at ") else " "
    return f"{words(kind)}{between}{' and '.join(bounds)}".strip()


def written(value: object) -> str:
    """Return a value as one writes it on a command line: null, true, [0.1,1]."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _dotted(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _section_in(hint: Any) -> type | None:
    """Return the section of an annotation, which may be optional."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)


def _example(cls: type[Section], name: str) -> str:
    keys = list(hints(cls))
    return f"{_dotted(name, 'enabled')}=false" if "enabled" in keys else f"{_dotted(name, keys[0])}=..."


def _booleans(value: object) -> bool:
    """Return True if the value is or holds True or False."""
    inside: Sequence[object] = value if isinstance(value, list | tuple) else ()
    return isinstance(value, bool) or any(map(_booleans, inside))


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=_LAX)
