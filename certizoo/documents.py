"""YAML and JSON from elsewhere: bounded before they are read, so that a small file costs little time and memory."""

import json
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
    MAX_DEPTH, of more than MAX_NODES values, with tags, or with aliases (a few of which stand for millions of values).
    """
    return parse_yaml(_text(path), str(path))


def parse_yaml(text: str, name: str) -> Any:
    """The same of a text; `name` says in messages where it comes from."""
    try:
        _bound(text, name)
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{name} is no YAML that can be read ({plain(str(error))[:200]}); write it again") from None


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
    """By the stream of events, which is as long as the text: nothing is built."""
    depth = nodes = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise UserError(f"{name} repeats values by an alias (*{plain(str(event.anchor))[:40]}); write them out")
        if (tag := getattr(event, "tag", None)) is not None:
            raise UserError(f"{name} holds a tag ({plain(tag)[:80]}); only plain values are read")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        nodes += isinstance(event, yaml.NodeEvent)
        if depth > MAX_DEPTH or nodes > MAX_NODES:
            raise UserError(f"{name} holds more than {MAX_DEPTH} levels or {MAX_NODES} values; replace it")
