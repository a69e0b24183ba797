"""What the commands of the registry print."""

from collections.abc import Sequence

from rich.table import Table

from registry.browse import Version
from registry.select import fact

CERTIFIED = "certified_acc."
FACTS = ("dataset", "attention", "penalty", "method", "clean_acc")
OWN = ("certificate_sha256", "certizoo", "git_commit", "trial", "search")  # never the same, and no result


def versions(found: Sequence[Version]) -> Table:
    """A row each, with what is certified of it."""
    radii = sorted({tag for v in found for tag in v.tags if tag.startswith(CERTIFIED)}, key=_radius)
    table = Table("name", "version", "alias", *(key.removesuffix("_acc") for key in FACTS), *radii)
    for v in found:
        table.add_row(v.name, v.version, " ".join(v.aliases), *(fact(v, tag) for tag in (*FACTS, *radii)))
    return table


def tags(version: Version) -> Table:
    """All tags of one version."""
    title = f"{version.name}/{version.version} {' '.join('@' + alias for alias in version.aliases)}"
    table = Table("tag", "value", title=title)
    for tag, value in sorted(version.tags.items()):
        table.add_row(tag, value)
    return table


def comparison(found: Sequence[Version]) -> Table:
    """A column each; what differs is bold, and the rows that differ come first."""
    table = Table("tag", *(f"{v.name}/{v.version}" for v in found))
    keys = sorted({key for v in found for key in v.tags})
    rows = [(key, [v.tags.get(key, "") for v in found]) for key in keys]
    for key, values in sorted(rows, key=lambda row: (row[0] in OWN, len(set(row[1])) == 1)):
        differs = len(set(values)) > 1
        table.add_row(key, *(f"[bold]{value}[/]" if differs else value for value in values))
    return table


def _radius(tag: str) -> tuple[float, str]:
    """Sort key: by the number behind the dot, other texts last."""
    try:
        return float(tag.removeprefix(CERTIFIED)), tag
    except ValueError:
        return float("inf"), tag
