"""YAML and JSON from elsewhere: bounded before they are read, so that a small file costs little time and memory."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from certizoo.errors import UserError
from certizoo.text import plain

MAX_BYTES = 4 * 2**20
MAX_DEPTH = 40
MAX_NODES = 200_000


def read_yaml(path: Path) -> Any:
    """What the file says, of plain values only. Raises UserError for a file of more than MAX_BYTES, nested deeper than
    MAX_DEPTH, of more than MAX_NODES values, those that aliases stand for counted each time, or with tags."""
    return parse_yaml(_text(path), str(path))


def parse_yaml(text: str, name: str) -> Any:
    """The same of a text; `name` says in messages where it comes from."""
    try:
        _bound(text, name)
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{name} is no YAML that can be read ({plain(str(error))[:200]}); write it again") from None


def yaml_of(content: Any) -> str:
    """The text of plain values, in their order. What occurs twice is written twice: people read no aliases."""
    return yaml.dump(content, Dumper=_Whole, sort_keys=False)


class _Whole(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def read_json(path: Path) -> Any:
    """What the file says. Raises UserError for a file of more than MAX_BYTES, or one that is no JSON."""
    try:
        return json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON that can be read ({plain(str(error))[:200]}); write it again") from None


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"{path} is larger than {MAX_BYTES // 2**20} MiB, which no file of its kind is; replace it")
        return content.decode()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is no text in UTF-8; write it again") from None


def _bound(text: str, name: str) -> None:
    """By the stream of events, which is as long as the text: nothing is built. An alias counts as what it repeats."""
    known: dict[str, tuple[int, int]] = {}  # anchor: values, levels
    opened = [_Part(None)]
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if (tag := getattr(event, "tag", None)) is not None:
            raise UserError(f"{name} holds a tag ({plain(tag)[:80]}); only plain values are read")
        if isinstance(event, yaml.CollectionEndEvent):
            done = opened.pop()
            opened[-1].add(*done.size)
            known |= {done.anchor: done.size} if done.anchor else {}
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append(_Part(event.anchor))
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in known:
                raise UserError(f"{name} holds an alias within itself (*{plain(str(event.anchor))[:40]}); write it out")
            opened[-1].add(*known[event.anchor])
        elif isinstance(event, yaml.ScalarEvent):
            opened[-1].add(1, 0)
            known |= {event.anchor: (1, 0)} if event.anchor else {}
        depth = len(opened) - 1 + opened[-1].levels
        if depth > MAX_DEPTH or sum(part.values for part in opened) > MAX_NODES:
            raise UserError(f"{name} holds more than {MAX_DEPTH} levels or {MAX_NODES} values; replace it")


@dataclass
class _Part:
    """A list or mapping as far as it was read: values in it at all levels, and the most levels below it."""

    anchor: str | None
    values: int = 0
    levels: int = 0

    @property
    def size(self) -> tuple[int, int]:
        return self.values + 1, self.levels + 1

    def add(self, values: int, levels: int) -> None:
        self.values += values
        self.levels = max(self.levels, levels)
