"""Every configuration file with its keys: default and meaning, as stated in the file."""

import re
from pathlib import Path

from certizoo.config.keys import keys_of
from docs.generate.tables import cell, code, table

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# Commands, in the order in which users meet them; other files belong to `python -m certify`. Then the groups that their
# `defaults` choose from. Recipes (model, experiment) have their own page.
COMMANDS = {
    "adv_train": "deepspeed trainers/adv_train.py",
    "std_train": "deepspeed trainers/std_train.py",
    "constrain": "deepspeed trainers/constrain.py",
    "certify": "python -m certify",
    "evaluate": "python -m certify evaluate",
    "analyse": "python -m certify analyse",
    "features": "python -m certify features",
    "tune": "python tune.py",
}
OWN_PAGE = {"model", "experiment"}
EXAMPLE = re.compile(r"^ {2,}\S|^$")  # an indented command in a header


def markdown() -> str:
    """Return one section per command and one per group."""
    others = sorted({path.stem for path in CONFIGS.glob("*.yaml")} - {*COMMANDS, "names", "experiments"})
    commands = COMMANDS | {name: f"python -m certify {name}" for name in others}
    parts = [_section(CONFIGS / f"{name}.yaml", f"`{command}`", 2) for name, command in commands.items()]
    for group in groups():
        parts.append(f"## `{group}=`\n")
        parts += [_section(path, f"`{group}={path.stem}`", 3) for path in sorted((CONFIGS / group).glob("*.yaml"))]
    return "\n".join(parts)


def groups() -> list[str]:
    """Return the groups of files that a command line chooses from, without those of recipes."""
    return sorted(path.name for path in CONFIGS.iterdir() if path.is_dir() and path.name not in OWN_PAGE)


def header(text: str) -> str:
    """Return the comment at the head of a file as Markdown, with indented examples as code."""
    paragraphs, examples = "", False
    for line in _comment(text):
        is_example = bool(EXAMPLE.match(line)) and (examples or line != "")
        if is_example != examples:
            paragraphs += "\n```text\n" if is_example else "```\n\n"
        examples = is_example
        paragraphs += (line.removeprefix("  ") if is_example else cell(line, pipes=False)) + "\n"
    return paragraphs + ("```\n" if examples else "")


def _comment(text: str) -> list[str]:
    """Return the lines of the head, with blank lines around examples removed."""
    lines = []
    for line in text.splitlines():
        if line.startswith("# @"):
            continue
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" ").rstrip())
    joined = re.sub(r"\n\n(?=  )", "\n", "\n".join(lines))
    return re.sub(r"(\n  [^\n]*)\n\n(?! )", r"\1\n", joined).splitlines()


def _section(path: Path, title: str, level: int) -> str:
    text = path.read_text()
    found = keys_of(text)
    rows = [(code(key.name), code(key.default), cell(key.meaning)) for key in found]
    meaning = any(key.meaning for key in found)
    columns = ("key", "default", "meaning") if meaning else ("key", "default")
    shown = table(columns, rows if meaning else [row[:2] for row in rows]) if rows else ""
    return f"{'#' * level} {title}\n\n`configs/{path.relative_to(CONFIGS).as_posix()}`\n\n{header(text)}\n{shown}\n"
