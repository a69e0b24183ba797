"""Escape text from outside for a terminal and for Markdown, and write tables as CSV or JSON."""

import csv
import html
import io
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

# C0 and C1 controls, changes of writing direction, and line separators: they move the cursor, colour the following
# text, or show letters in another order.
_ACTIVE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Return the text on one line with every control character as its code, so that escape sequences have no effect."""
    return _ACTIVE.sub(lambda found: " " if found[0] in "\n\t" else f"\\x{ord(found[0]):02x}", _whole(text))


def shown(value: object) -> str:
    """Format a value of any kind for a message: one short line."""
    try:
        return " ".join(repr(value).split())[:60]
    except Exception:  # the object's own error; also whole numbers beyond 4300 digits
        return f"(a value of type {type(value).__name__})"


def markdown(text: object) -> str:
    """Escape the text for Markdown: no HTML, link, emphasis or table cell."""
    return re.sub(r"([\\`*_\[\](){}#|~!])", r"\\\1", html.escape(plain(str(text))))


def code(text: object) -> str:
    """Return the text as a code span, which has no escapes."""
    return f"`{re.sub('[`<>|]', '?', plain(str(text))).replace('](', '] (')}`"


def written(keys: Iterable[str], records: Sequence[Mapping[str, object]], form: Literal["csv", "json"]) -> str:
    """Return records with these keys as CSV, whose first line are the keys, or as a JSON list."""
    if form == "json":
        return json.dumps([*map(dict, records)], indent=1) + "\n"
    text = io.StringIO()
    writer = csv.DictWriter(text, list(keys), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _whole(text: str) -> str:
    """Replace lone surrogates, which a terminal cannot display."""
    return unicodedata.normalize("NFC", text.encode("utf-8", "replace").decode("utf-8"))
