"""The files of configs/: their notes, the commands in them, and one recipe of each shape."""

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import zoo
from certizoo.config.compose import CONFIGS
from certizoo.config.recipes import row

COMMAND = re.compile(r"^#\s+((?:certizoo|deepspeed|python|make) .+?)(?:   .*)?$", re.MULTILINE)


def files(group: str) -> list[Path]:
    """Return the files of a group."""
    return sorted((CONFIGS / group).glob("*.yaml"))


@cache
def note(path: Path) -> str:
    """Return the comments at the head of the file."""
    lines = path.read_text().splitlines()
    head = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    return "\n".join(line for line in head if "@package" not in line)


def training(path: Path) -> list[tuple[str, list[str]]]:
    """Return (entry, overrides) of the training commands in the note."""
    words = [shlex.split(command) for command in COMMAND.findall(note(path)) if command.startswith("deepspeed ")]
    scripts = [next(i for i, word in enumerate(each) if word.startswith("trainers/")) for each in words]
    return [(Path(each[i]).stem, each[i + 1 :]) for each, i in zip(words, scripts, strict=True)]


def recipe(name: str) -> dict[str, Any]:
    """Return the recipe of a model, from its file or from the table."""
    path = CONFIGS / "model" / f"{name}.yaml"
    if path.is_file():
        return dict(yaml.safe_load(path.read_text()))
    return row("model", name, CONFIGS) or {}


def one_of_each_shape() -> list[str]:
    """Return models whose recipes stand for all that override the same groups and set the same keys."""

    def shape(found: dict[str, Any]) -> tuple[str, ...]:
        keys = sorted(f"{key}.{inner}" for key, value in found.items() if isinstance(value, dict) for inner in value)
        return (*map(str, found.get("defaults", ())), *(key for key in keys if not key.startswith("model.")))

    return sorted({shape(recipe(name)): name for name in zoo.list_models()}.values())
