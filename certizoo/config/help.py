"""`--help` of a command whose options are the keys of a configuration: default, allowed values, meaning.

Defaults are those of the composed configuration, allowed values those of its section (schema.py), and meanings the
comments of the files.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from certizoo.config.compose import CONFIGS, defaults_of
from certizoo.config.keys import keys_of
from certizoo.config.schema import Section, words_of

WIDTH, INDENT = 100, " " * 6
FLAGS = ("-h", "--help")


def wants_help(argv: Sequence[str]) -> bool:
    """Return True if one of the words asks for help."""
    return any(word in FLAGS for word in argv)


def config_help(command: str, config_name: str, section: type[Section], configs: Path = CONFIGS) -> str:
    """Return the help of `command`, whose keys are those of configs/{config_name}.yaml and of `section`."""
    allowed, meanings = words_of(section), dict(_meanings(config_name, "", configs))
    lines = [f"{command} KEY=VALUE ...", "", *_head(configs / f"{config_name}.yaml"), ""]
    lines += _groups(config_name, configs)
    for key, default in defaults_of(config_name, configs).items():
        said = ". ".join(filter(None, (allowed.get(key), meanings.get(key))))
        lines.append(f"  {key}={default}")
        lines += textwrap.wrap(said, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    return "\n".join(lines) + "\n"


def _head(path: Path) -> Iterator[str]:
    """Iterate over the comment at the head of the file."""
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            return
        if not line.startswith("# @"):
            yield line.removeprefix("#").removeprefix(" ")


def _groups(config_name: str, configs: Path) -> list[str]:
    """Return the lines about groups, and the title of the keys."""
    groups = dict.fromkeys(_group_names(config_name, configs))
    choices = {group: names for group in groups if len(names := _names(group, configs)) > 1}
    if not choices:
        return ["Keys, defaults, allowed values:"]
    rows = [f"  {group}={'|'.join(names)}" for group, names in choices.items()]
    lines = [line for row in rows for line in textwrap.wrap(row, WIDTH, subsequent_indent=INDENT)]
    return ["Groups of keys, chosen as a whole:", *lines, "", "Keys, defaults, allowed values:"]


def _group_names(config_name: str, configs: Path) -> Iterator[str]:
    """Iterate over the groups of a file and of those that it continues."""
    for group, name, _ in _parts(config_name, configs):
        if group:
            yield group
        elif name is not None:
            yield from _group_names(name, configs)


def _names(group: str, configs: Path) -> list[str]:
    return sorted(path.stem for path in (configs / group).glob("*.yaml"))


def _meanings(config_name: str, prefix: str, configs: Path) -> Iterator[tuple[str, str]]:
    """Iterate over (key, comment) of a file and of those that it is made of."""
    for group, name, below in _parts(config_name, configs):
        if name is not None:
            yield from _meanings(f"{group}/{name}" if group else name, below, configs)
    for key in keys_of((configs / f"{config_name}.yaml").read_text()):
        yield prefix + key.name, key.meaning


def _parts(config_name: str, configs: Path) -> Iterator[tuple[str, str | None, str]]:
    """Iterate over (group or "", its chosen file or None, prefix of its keys) of the `defaults` of a file."""
    content: Mapping[str, Any] = yaml.safe_load((configs / f"{config_name}.yaml").read_text()) or {}
    for entry in content.get("defaults", ()):
        if entry == "_self_":
            continue
        if isinstance(entry, str):
            yield "", entry, ""
            continue
        (said, name), *_ = entry.items()
        group, _, package = said.removeprefix("override ").removeprefix("/").partition("@")
        yield group, name, "" if package == "_global_" else f"{group}."
