"""Recipes that several models share: configs/names.yaml."""

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml


def shared_recipe(name: str, configs: Path) -> dict[str, Any]:
    """Return the content of a file configs/model/NAME.yaml for a model without one.

    Every name has a recipe: the zoo, which this room does not import, refuses unknown models.
    """
    found = next((recipe for pattern, recipe in _table(configs).items() if fnmatchcase(name, pattern)), {})
    return found | {"model": {"name": name} | found.get("model", {})}


@cache
def _table(configs: Path) -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = yaml.safe_load((configs / "names.yaml").read_text())
    return table
