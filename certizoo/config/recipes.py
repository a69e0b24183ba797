"""Shared recipes of models and experiments without a file: configs/names.yaml and configs/experiments.yaml."""

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLES = {"model": "names.yaml", "experiment": "experiments.yaml"}  # group: its table


def row(group: str, name: str, configs: Path) -> dict[str, Any] | None:
    """Return the content of a file configs/GROUP/NAME.yaml that does not exist; None if no table has it.

    Every model has a recipe: the zoo, which this room does not import, refuses unknown names.
    """
    found = next((content for key, content in table(group, configs).items() if fnmatchcase(name, key)), {})
    if group == "model" and name.isidentifier():
        return found | {"model": {"name": name} | found.get("model", {})}
    if group == "experiment" and found:
        return found | {"name": f"{name}-${{model.name}}-s${{seed}}"}
    return None


@cache
def table(group: str, configs: Path) -> dict[str, dict[str, Any]]:
    """Return {name or pattern: content} of the group's table."""
    if group not in TABLES:
        return {}
    found: dict[str, dict[str, Any]] = yaml.safe_load((configs / TABLES[group]).read_text())
    return found
