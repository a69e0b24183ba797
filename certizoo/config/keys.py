"""The keys of a YAML file with their comments: a comment follows its value, on its line and the lines below."""

from collections.abc import Iterator
from dataclasses import dataclass

import yaml


@dataclass(frozen=True)
class Key:
    """One key of a file: its dotted name, its default as written in the file, and its comment."""

    name: str
    default: str
    meaning: str


def keys_of(text: str) -> list[Key]:
    """Return the keys of a YAML file in its order; lists are values."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        return []
    return [key for key in _keys(root, text.splitlines(), "") if not key.name.startswith("defaults")]


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
