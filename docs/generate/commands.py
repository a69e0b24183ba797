"""The output of `--help` of every command."""

import argparse
import os
from collections.abc import Iterator
from unittest.mock import patch

WIDTH = "84"


def markdown() -> str:
    """Return a section per program, with its sub-commands."""
    with patch.dict(os.environ, {"COLUMNS": WIDTH}):
        own = [_section(parser) for parser in parsers()]
    return "\n".join([*own, *(f"## {name}\n\n{_block(text)}" for name, text in _texts().items())])


def _texts() -> dict[str, str]:
    """Return the help of the other commands, most of which take the keys of a configuration."""
    import certify.__main__ as certify
    import certizoo.__main__ as program
    import trainers.doctor.findings
    from certizoo.config.help import config_help
    from trainers.job.keys import TrainerKeys

    train = {f"deepspeed trainers/{name}.py": name for name in program.SCRIPTS}
    named = {f"python -m certify {name}".removesuffix(" certify"): name for name in certify.COMMANDS}
    return {
        "certizoo": program.usage(),
        **{command: config_help(command, name, TrainerKeys) for command, name in train.items()},
        **{command: certify.help_of(name) for command, name in named.items()},
        "python -m trainers.doctor": trainers.doctor.findings.__doc__ or "",
    }


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Iterate over the parsers; they are imported here because together they take seconds."""
    import certify.explain_command
    import certizoo.registry.__main__
    import certizoo.shards.__main__
    import tuning.__main__
    import zoo.__main__
    from certizoo.config.compose import compose_config

    yield certizoo.shards.__main__.parser()
    yield zoo.__main__.parser()
    yield certify.explain_command.parser()
    yield tuning.__main__.parser(compose_config("tune", []))
    yield certizoo.registry.__main__.parser()


def _section(parser: argparse.ArgumentParser) -> str:
    parts = [f"## {parser.prog}\n", _help(parser)]
    for name, command in commands_of(parser).items():
        parts += [f"### {parser.prog} {name}\n", _help(command)]
    return "\n".join(parts)


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the sub-commands of a program."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: command for action in found for name, command in action.choices.items()}


def _help(parser: argparse.ArgumentParser) -> str:
    return _block(parser.format_help())


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"
