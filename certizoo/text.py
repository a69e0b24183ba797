"""Text from outside, made fit for a terminal, and for Markdown."""

import html
import re
import unicodedata

# C0 and C1 controls, what turns the direction of writing, and line separators: they move the cursor, colour what
# follows, or show another order of letters than that which is there.
_ACTIVE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """The text on one line, every active character as its code: an escape sequence shows instead of acting."""
    return _ACTIVE.sub(lambda found: " " if found[0] in "\n\t" else f"\\x{ord(found[0]):02x}", _whole(text))


def shown(value: object) -> str:
    """A value of any kind in a message: one line, not long."""
    try:
        return " ".join(repr(value).split())[:60]
    except Exception:  # of whatever object was given; of whole numbers beyond 4300 digits, too
        return f"a {type(value).__name__}"


def markdown(text: object) -> str:
    """Text within Markdown that stays text: no HTML, no link, no emphasis, no cell of a table."""
    return re.sub(r"([\\`*_\[\](){}#|~!])", r"\\\1", html.escape(plain(str(text))))


def code(text: object) -> str:
    """The same as a span of code, which knows no escapes."""
    return f"`{re.sub('[`<>|]', '?', plain(str(text))).replace('](', '] (')}`"


def _whole(text: str) -> str:
    """Half characters, which a terminal cannot be sent, replaced."""
    return unicodedata.normalize("NFC", text.encode("utf-8", "replace").decode("utf-8"))
