"""The output of `--help` of every command."""

import argparse
import os
from collections.abc import Iterator
from unittest.mock import patch

WIDTH = "84"


def markdown() -> str:
    """Return a section per program, with its sub-commands."""
    with patch.dict(os.environ, {"COLUMNS": WIDTH}):
        return "\n".join(_section(parser) for parser in _parsers())


def _parsers() -> Iterator[argparse.ArgumentParser]:
    """Iterate over the parsers; they are imported here because together they take seconds."""
    import certify.explanation
    import certizoo.registry.__main__
    import certizoo.shards.__main__
    import tuning.__main__
    import zoo.__main__
    from certizoo.config.compose import compose_config

    yield certizoo.shards.__main__.parser()
    yield zoo.__main__.parser()
    yield certify.explanation.parser()
    yield tuning.__main__.parser(compose_config("tune", []))
    yield certizoo.registry.__main__.parser()


def _section(parser: argparse.ArgumentParser) -> str:
    parts = [f"## {parser.prog}\n", _help(parser)]
    for name, command in _commands(parser).items():
        parts += [f"### {parser.prog} {name}\n", _help(command)]
    return "\n".join(parts)


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: command for action in found for name, command in action.choices.items()}


def _help(parser: argparse.ArgumentParser) -> str:
    return f"```text\n{parser.format_help().rstrip()}\n```\n"
