"""Recipes and experiments: every file in full, as a lab note, after the table of those without a file."""

from docs.generate.config_keys import CONFIGS

GROUPS = {
    "model": "deepspeed trainers/adv_train.py +model=",
    "experiment": "deepspeed trainers/adv_train.py +experiment=",
}
TABLES = {"model": "names", "experiment": "experiments"}


def markdown() -> str:
    """Return a section per group, with a box that opens for each file."""
    return "\n".join(_group(name, command) for name, command in GROUPS.items())


def _group(name: str, command: str) -> str:
    paths = [CONFIGS / f"{TABLES[name]}.yaml", *sorted((CONFIGS / name).glob("*.yaml"))]
    boxes = [_box(path.stem, path.read_text()) for path in paths]
    return f"## `{command}NAME`\n\n" + "\n".join(boxes)


def _box(name: str, text: str) -> str:
    body = "\n".join(f"    {line}".rstrip() for line in text.rstrip().splitlines())
    return f'??? note "{name}"\n\n    ```yaml\n{body}\n    ```\n'
