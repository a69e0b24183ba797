"""Markdown tables of texts that may contain anything."""

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Return a table; cells are Markdown already (`cell`, `code`). `right`: columns of numbers."""
    line = "|" + "|".join(" --: " if column in right else " --- " for column in columns) + "|"
    return "\n".join([_row(columns), line, *map(_row, rows)]) + "\n"


def cell(text: str, pipes: bool = True) -> str:
    """Escape plain words for Markdown; words in backquotes become code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return _escaped(text, pipes)
    return "".join(_escaped(part, pipes) if i % 2 == 0 else code(part) for i, part in enumerate(parts))


def code(text: str) -> str:
    """Format as code; '' stays ''."""
    mark = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{mark}{pad}{text.replace('|', chr(92) + '|')}{pad}{mark}" if text else ""


def _escaped(text: str, pipes: bool) -> str:
    for sign in ("\\", "*", "_", "[", "]", "{", "}", "$", *("|" * pipes)):
        text = text.replace(sign, f"\\{sign}")
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
