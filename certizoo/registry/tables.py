"""Output of the registry's commands. Text from the registry is printed without markup or control characters."""

from collections.abc import Sequence

from rich.markdown import Markdown
from rich.table import Column, Table
from rich.text import Text

from certizoo.registry.browse import Version
from certizoo.registry.select import fact
from certizoo.registry.versions import version_tags
from certizoo.text import plain

NAMES = ("name", "version", "alias")
FACTS = ("dataset", "attention", "penalty", "method", "clean_acc")
OWN = ("certificate_sha256", "files_sha256", "code_sha256", "weights_sha256", "certizoo", "git_commit", "trial",
       "search", "search_id")  # always different, and not results  # fmt: skip
MAX_CARD = 5000


def columns(found: Sequence[Version]) -> dict[str, str]:
    """Return the headings of what versions are and prove, each with its tag; name, version and aliases are no tags."""
    radii = sorted({tag for v in found for tag in v.tags if tag.startswith(f"{version_tags.CERTIFIED}.")}, key=_radius)
    return {tag.removesuffix("_acc"): tag for tag in FACTS} | {plain(tag): tag for tag in radii}


def records(found: Sequence[Version]) -> list[dict[str, str]]:
    """Return one record per version: NAMES and the columns."""
    tag_of = columns(found)
    return [
        dict(zip(NAMES, map(plain, (v.name, v.version, " ".join(v.aliases))), strict=True))
        | {heading: plain(fact(v, tag)) for heading, tag in tag_of.items()}
        for v in found
    ]


def versions(found: Sequence[Version]) -> Table:
    """Return a table with one row per version."""
    table = _table(*NAMES, *columns(found))
    for row in records(found):
        table.add_row(*map(_text, row.values()))
    return table


def tags(version: Version) -> Table:
    """Return a table of all tags of one version."""
    table = _table("tag", "value")
    table.title = _text(f"{version.name}/{version.version} {' '.join('@' + alias for alias in version.aliases)}")
    for tag, value in sorted(version.tags.items()):
        table.add_row(_text(tag), _text(value))
    return table


def card(version: Version) -> Markdown:
    """Return the description. Its links are printed as text instead of being clickable."""
    lines = version.description[:MAX_CARD].split("\n")
    return Markdown("\n".join(map(plain, lines)), hyperlinks=False)


def comparison(found: Sequence[Version]) -> Table:
    """Return a table with one column per version; differing rows come first, in bold."""
    table = _table("tag", *(f"{v.name}/{v.version}" for v in found))
    keys = sorted({key for v in found for key in v.tags})
    rows = [(key, [v.tags.get(key, "") for v in found]) for key in keys]
    for key, values in sorted(rows, key=lambda row: (row[0] in OWN, len(set(row[1])) == 1)):
        style = "bold" if len(set(values)) > 1 else ""
        table.add_row(_text(key), *(_text(value, style) for value in values))
    return table


def _table(*columns: str) -> Table:
    return Table(*(Column(_text(name)) for name in columns))


def _text(value: str, style: str = "") -> Text:
    return Text(plain(value), style=style)


def _radius(tag: str) -> tuple[str, float, str]:
    """Return a sort key: by the norm, then by the number at the end, other texts last."""
    _, norm, eps = version_tags.parts(tag)
    try:
        return norm, float(eps), tag
    except ValueError:
        return norm, float("inf"), tag
