"""Recipes and experiments: every file in full, as a lab note, after the table of those without a file."""

from certizoo.config.compose import CONFIGS
from certizoo.config.recipes import TABLES

GROUPS = {
    "model": "deepspeed trainers/adv_train.py +model=",
    "experiment": "deepspeed trainers/adv_train.py +experiment=",
}


def markdown() -> str:
    """Return a section per group, with a box that opens for each file."""
    return "\n".join(_group(name, command) for name, command in GROUPS.items())


def _group(name: str, command: str) -> str:
    paths = [CONFIGS / TABLES[name], *sorted((CONFIGS / name).glob("*.yaml"))]
    boxes = [_box(path.stem, path.read_text()) for path in paths]
    return f"## `{command}NAME`\n\n" + "\n".join(boxes)


def _box(name: str, text: str) -> str:
    body = "\n".join(f"    {line}".rstrip() for line in text.rstrip().splitlines())
    return f'??? note "{name}"\n\n    ```yaml\n{body}\n    ```\n'
