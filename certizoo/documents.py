"""YAML and JSON from elsewhere, bounded before parsing, so that a small file costs little time and memory."""

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
    """Return the file's content, plain values only.

    Raises UserError for a file of more than MAX_BYTES, nested deeper than MAX_DEPTH, with more than MAX_NODES values
    (counting what aliases repeat), or with tags.
    """
    return parse_yaml(_text(path), str(path))


def parse_yaml(text: str, name: str) -> Any:
    """Parse a text in the same way; `name` is its origin in messages."""
    try:
        _bound(text, name)
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{name} is not readable YAML ({plain(str(error))[:200]}); write it again") from None


def yaml_of(content: Any) -> str:
    """Return the YAML of plain values, in their order. Repeated values are written out: people do not read aliases."""
    return yaml.dump(content, Dumper=_Whole, sort_keys=False)


class _Whole(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def read_json(path: Path) -> Any:
    """Return the file's content. Raises UserError for a file of more than MAX_BYTES, or one that is not JSON."""
    try:
        return json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON ({plain(str(error))[:200]}); write it again") from None


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"{path} is larger than {MAX_BYTES // 2**20} MiB, too large for such a file; replace it")
        return content.decode()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; write it again") from None


def _bound(text: str, name: str) -> None:
    """Check the limits on the stream of events, which is as long as the text. An alias counts as what it repeats."""
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
    """A partly read list or mapping: the values in it at all levels, and the most levels below it."""

    anchor: str | None
    values: int = 0
    levels: int = 0

    @property
    def size(self) -> tuple[int, int]:
        return self.values + 1, self.levels + 1

    def add(self, values: int, levels: int) -> None:
        self.values += values
        self.levels = max(self.levels, levels)
