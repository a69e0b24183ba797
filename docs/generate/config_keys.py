"""Every configuration file with its keys: default and meaning, as stated in the file."""

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import certify.__main__ as certify
from certizoo.config.compose import CONFIGS
from certizoo.config.keys import keys_of
from certizoo.config.schema import words_of
from docs.generate.tables import cell, code, table
from trainers.job.keys import TrainerKeys

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
    parts = [
        _section(CONFIGS / f"{name}.yaml", f"`{command}`", 2, _allowed(name)) for name, command in commands.items()
    ]
    for group in groups():
        parts.append(f"## `{group}=`\n")
        allowed = {key.removeprefix(f"{group}."): said for key, said in words_of(TrainerKeys).items()}
        parts += [
            _section(path, f"`{group}={path.stem}`", 3, allowed) for path in sorted((CONFIGS / group).glob("*.yaml"))
        ]
    return "\n".join(parts)


def _allowed(command: str) -> dict[str, str]:
    """Return the allowed values of the keys of a command."""
    if command == "tune":  # options of argparse: their page is that of --help
        return {}
    if command not in certify.COMMANDS:
        return words_of(TrainerKeys)
    module, _, keys = certify.COMMANDS[command]
    return words_of(getattr(import_module(module), keys))


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


def _section(path: Path, title: str, level: int, allowed: Mapping[str, str]) -> str:
    text = path.read_text()
    rows = [
        (code(key.name), code(key.default), cell(allowed.get(key.name, "")), cell(key.meaning)) for key in keys_of(text)
    ]
    used = [place for place in range(4) if any(row[place] for row in rows)]
    columns = [("key", "default", "allowed", "meaning")[place] for place in used]
    shown = table(columns, [[row[place] for place in used] for row in rows]) if rows else ""
    return f"{'#' * level} {title}\n\n`configs/{path.relative_to(CONFIGS).as_posix()}`\n\n{header(text)}\n{shown}\n"
