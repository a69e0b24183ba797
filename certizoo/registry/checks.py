"""Checks of spools, which may come from someone else; no content is used before it has passed.

Every check raises ValueError saying what is wrong; a path stays inside the folder that it is relative to.
"""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

STATUSES = ("FINISHED", "FAILED", "KILLED")
MAX_TEXT = 500  # characters of a name; parameters may be longer (records.MAX_PARAM)
RUN_ID = re.compile(r"(spool-)?[\w-]{1,64}", re.ASCII)  # it is used in a query


def record(found: Any) -> None:
    """Check that `found` is a record as listed in certizoo/registry/records.py."""
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    match found.get("kind"):
        case "start":
            _texts(found, "experiment", "run_name")
            run_id(found.get("run_id"))
            if not isinstance(found.get("key"), str) or not RUN_ID.fullmatch(found["key"]):
                raise ValueError("key is not a word of letters and digits")
            mapping(found.get("params"), "params", str)
            _whole(found.get("time"), "time")
        case "metrics":
            if not isinstance(found.get("rows"), list):
                raise ValueError("rows is no list")
            for row in found["rows"]:
                _row(row)
        case "artifacts":
            _texts(found, "folder")
            if found.get("path") is not None:
                _texts(found, "path")
                relative(found["path"])
        case "finish":
            if found.get("status") not in STATUSES:
                raise ValueError(f"status is not one of {', '.join(STATUSES)}")
            _whole(found.get("time"), "time")
        case _:
            raise ValueError("an unknown kind of record")


def run_id(found: Any) -> None:
    if found is not None and not (isinstance(found, str) and RUN_ID.fullmatch(found)):
        raise ValueError("run_id is not the id of a run")


def mapping(found: Any, what: str, kind: type | tuple[type, ...]) -> None:
    if not isinstance(found, Mapping) or not all(
        isinstance(key, str) and len(key) <= MAX_TEXT and isinstance(value, kind) for key, value in found.items()
    ):
        raise ValueError(f"{what} is not a mapping of short names to values")
    for text in (text for item in found.items() for text in item if isinstance(text, str)):
        _storable(text)


def inside(base: Path, named: str) -> Path:
    """Return the folder `named`, relative to `base`; it must exist, and its links must not lead out of `base`."""
    root, folder = base.resolve(), (base / named).resolve()
    if Path(named).is_absolute() or not folder.is_relative_to(root):
        raise ValueError(f"{named} lies outside of {base}")
    if not folder.is_dir():
        raise ValueError(f"{folder} is gone")
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise ValueError(f"{path.relative_to(folder)} is a link to outside of {base}")
    return folder


def relative(named: str) -> None:
    path = PurePosixPath(named)
    if path.is_absolute() or ".." in path.parts or "\\" in named:
        raise ValueError("path leads elsewhere")


def _row(row: Any) -> None:
    if not isinstance(row, list) or len(row) != 4:
        raise ValueError("a row is not [name, value, time, step]")
    name, value, at, step = row
    if not isinstance(name, str) or len(name) > MAX_TEXT:
        raise ValueError(f"the name of a row is not a text of at most {MAX_TEXT} characters")
    _storable(name)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (isinstance(value, int) and abs(value) > 2**999)
    ):
        raise ValueError("the value of a row is not a number")  # NaN and infinity are allowed: a run may diverge
    _whole(at, "time")
    _whole(step, "step")


def _whole(found: Any, what: str) -> None:
    if isinstance(found, bool) or not isinstance(found, int) or abs(found) >= 2**62:
        raise ValueError(f"{what} is not a whole number of 64 bits")


def _texts(found: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        if not isinstance(found.get(key), str) or len(found[key]) > MAX_TEXT:
            raise ValueError(f"{key} is not a text of at most {MAX_TEXT} characters")
        _storable(found[key])


def _storable(text: str) -> None:
    """Refuse lone surrogates, which raise by themselves, and NUL: databases accept neither."""
    if b"\0" in text.encode():
        raise ValueError("a text holds NUL")
