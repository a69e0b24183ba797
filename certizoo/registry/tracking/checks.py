"""Checks of values in a run folder, which may come from someone else; no content is used before it has passed.

Every check raises ValueError saying what is wrong; a path stays inside the folder that it is relative to.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from certizoo.config.schema import Matching, Text

ModelName = Annotated[Text, Matching(r"(?=.*\w)[\w.-]{1,100}", "a name of up to 100 letters, digits, '_', '-' and '.'")]
# The limit of MLflow's columns is 256 characters, that of its folders 255 bytes.
ExperimentName = Annotated[Text, Matching(r"(?=.*\S)[^\x00-\x1f\x7f]{1,200}", "a name of up to 200 characters")]
MAX_TEXT = 500  # characters of a name
WORD = re.compile(r"[\w-]{1,64}", re.ASCII)  # ids and keys are used in queries


def text(found: Any, what: str, most: int = MAX_TEXT) -> None:
    """Raise ValueError for other types, long strings and NUL. Lone surrogates raise in encode()."""
    if not isinstance(found, str) or len(found) > most or b"\0" in found.encode():
        raise ValueError(f"{what} is not a string of at most {most} characters")


def word(found: Any, what: str) -> None:
    if not isinstance(found, str) or not WORD.fullmatch(found):
        raise ValueError(f"{what} is not a word of letters and digits")


def whole(found: Any, what: str) -> None:
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < 2**62:
        raise ValueError(f"{what} is not a whole number below 2^62")


def number(found: Any, what: str) -> float:
    """Return the number; NaN and infinity are allowed, because a run may diverge."""
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError(f"{what} is not a number")
    return float(found)


def mapping(found: Any, what: str) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise ValueError(f"{what} is not a mapping")
    for name in found:
        text(name, f"a name in {what}")
    return dict(found)


def inside(base: Path, named: str) -> Path:
    """Return the folder `named`, relative to `base`. It exists, holds files only, and no link leads out of `base`."""
    root, folder = base.resolve(), (base / named).resolve()
    if Path(named).is_absolute() or not folder.is_relative_to(root):
        raise ValueError(f"{named} lies outside of {base}")
    if not folder.is_dir():
        raise ValueError(f"{folder} no longer exists")
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise ValueError(f"{path.relative_to(folder)} is a link to outside of {base}")
        if not path.is_file() and not path.is_dir():  # reading a pipe would wait forever
            raise ValueError(f"{path.relative_to(folder)} is not a file")
    return folder
