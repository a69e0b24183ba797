"""Every configuration file with its keys: default and meaning, as stated in the file."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

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


@dataclass(frozen=True)
class Key:
    """One key of a file: its dotted name, its default as written in the file, and its comment."""

    name: str
    default: str
    meaning: str


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


def keys_of(text: str) -> list[Key]:
    """Return the keys of a YAML file in its order; lists are values."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        return []
    return [key for key in _keys(root, text.splitlines(), "") if not key.name.startswith("defaults")]


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


def _keys(node: yaml.MappingNode, lines: list[str], prefix: str) -> Iterator[Key]:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and not value.flow_style and value.value:
            if said := _said(lines, key.start_mark.line, len(lines[key.start_mark.line])):
                yield Key(name, "", said)
            yield from _keys(value, lines, f"{name}.")
        else:
            yield Key(name, _source(value, lines), _said(lines, value.end_mark.line, value.end_mark.column))


def _source(value: yaml.Node, lines: list[str]) -> str:
    """Return the value as written in the file; for a list over several lines, its items."""
    start, end = value.start_mark, value.end_mark
    if start.line == end.line:
        return lines[start.line][start.column : end.column]
    return yaml.safe_dump(_plain(value), default_flow_style=True, width=10_000).strip()


def _plain(value: yaml.Node) -> object:
    if isinstance(value, yaml.SequenceNode):
        return [_plain(item) for item in value.value]
    if isinstance(value, yaml.MappingNode):
        return {str(key.value): _plain(item) for key, item in value.value}
    return value.value


def _said(lines: list[str], line: int, column: int) -> str:
    """Return the comment after a value and its continuation lines; else that in the lines above."""
    if line >= len(lines):
        return ""
    _, mark, comment = lines[line][min(column, len(lines[line]) - 1) :].partition("#")
    if not mark:
        return ""
    words, at = [comment.strip()], lines[line].rindex(f"#{comment}")
    for below in lines[line + 1 :]:
        if not below.strip().startswith("#") or abs(below.index("#") - at) > 0:
            break
        words.append(below.strip().removeprefix("#").strip())
    return " ".join(words)
