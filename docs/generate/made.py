"""The parts that pages include by a line `<!-- made at build: WORD [ARGUMENT] -->`, by word."""

import re
from collections.abc import Callable
from functools import cache

from docs import ROOT
from docs.generate import (
    api,
    commands,
    config_keys,
    leaderboard,
    links,
    models_table,
    notebook,
    recipes,
    scale,
    versions,
    weights_table,
    zoo_table,
)

MARK = re.compile(r"^<!-- made at build: (\w+)(?: (\S+) (\S+))? -->$", re.M)
# WORD -> Markdown
PARTS: dict[str, Callable[[], str]] = {
    "api_registry": api.page_of("certizoo.registry"),
    "api_zoo": api.page_of("zoo"),
    "commands": commands.markdown,
    "config_keys": config_keys.markdown,
    "leaderboard": leaderboard.markdown,
    "leaderboard_chart": leaderboard.first_chart,
    "models": models_table.markdown,
    "notebook": notebook.markdown,
    "recipes": recipes.markdown,
    "scale": scale.markdown,
    "versions": versions.markdown,
    "weights": weights_table.markdown,
    "zoo_table": zoo_table.markdown,
}


def filled(markdown: str) -> str:
    """Return the text with all included parts. Raises ValueError for an unknown word."""
    return MARK.sub(lambda found: _part(found[1], found[2], found[3]), markdown)


def files() -> dict[str, str]:
    """Return generated files of the site by path, except pages."""
    return leaderboard.files()


@cache
def _part(word: str, path: str | None, page: str | None) -> str:
    if word == "file" and path and page:
        return _included(path, page)
    if word not in PARTS:
        raise ValueError(f"there is no part {word!r}; use one of {', '.join(PARTS)}, or file PATH PAGE")
    return PARTS[word]()


def _included(path: str, page: str) -> str:
    """Return a Markdown file of the repository without its first heading, as a part of docs/`page`."""
    text = re.sub(r"\A# .*\n", "", (ROOT / path).read_text())
    return four_spaces(links.rebased(text, path.rpartition("/")[0], page))


def four_spaces(markdown: str) -> str:
    """Convert three-space indentation of numbered items, which GitHub accepts, to Python-Markdown's four."""
    lines, inside = [], False
    for line in markdown.splitlines():
        if re.match(r"\d\. ", line):
            inside = True
        elif line and not line.startswith("   "):
            inside = False
        lines.append(f" {line}" if inside and line.startswith("   ") else line)
    return "\n".join(lines) + "\n"
