"""The command `python -m certify [COMMAND] KEY=VALUE ...`; each command has its configuration and its code.

(none)      certify a hand-over                         configs/certify.yaml    certify/stage/cli.py
evaluate    certify and attack it                       configs/evaluate.yaml   certify/evaluation/cli.py
analyse     the papers' figures, inside a model         configs/analyse.yaml    certify/papers/cli.py
features    the papers' figures, under attack           configs/features.yaml   certify/papers/cli.py
image       photographs: class, radius, nearest attack  configs/image.yaml      certify/photos/cli.py
serve       the same as a page on this machine          configs/serve.yaml      certify/photos/cli.py
submit      make a leaderboard entry from results       configs/submit.yaml     certify/leaderboard/cli.py
check       recheck an entry                            configs/check.yaml      certify/leaderboard/cli.py

`python -m certify COMMAND --help` lists the keys of a command.
"""

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from certify.shared.certificate import UnsoundCertificate
from certizoo import UserError
from certizoo.config.compose import compose_config
from certizoo.config.help import config_help, wants_help
from certizoo.errors import one_line_errors
from certizoo.memory import keep_freed_memory
from certizoo.nearest import unknown


@one_line_errors
def main(argv: Sequence[str]) -> None:
    """Run one command. A one-line error exits with status 2."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    name = argv[0] if argv and argv[0] in COMMANDS else "certify"
    if argv and argv[0].isidentifier() and argv[0] not in COMMANDS:
        raise unknown("command", argv[0], COMMANDS)
    if wants_help(argv):
        sys.stdout.write(help_of(name, overview=argv[:1] != [name]))
        return
    words, apart = set_apart(name, argv[1:] if argv[:1] == [name] else argv)
    try:
        config = compose_config(name, words) | apart
        keep_freed_memory()
        module, function, _ = COMMANDS[name]
        getattr(import_module(module), function)(config)
    except KeyboardInterrupt:
        raise UserError("stopped; the same command continues after the last row") from None
    except UnsoundCertificate as error:
        raise UserError(str(error)) from None


def help_of(name: str, *, overview: bool = False) -> str:
    """Return the help of a command, after the list of all commands if `overview`."""
    module, _, keys = COMMANDS[name]
    command = "python -m certify" + ("" if name == "certify" else f" {name}{' FILE...' if name in WITH_FILES else ''}")
    return (f"{__doc__}\n" if overview else "") + config_help(command, name, getattr(import_module(module), keys))


def set_apart(name: str, argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split the words into those for Hydra and the others.

    The others are `model=`, which would choose a recipe in Hydra, and files.
    """
    words, apart, files = [], dict[str, Any](), []
    for word in argv:
        key, equals, value = word.partition("=")
        if equals and key == "model":
            apart = {"version": value, "model": None} if "@" in value or "/" in value else {"model": value}
        elif name in WITH_FILES and not word.startswith("-") and (not equals or Path(word).is_file()):
            files.append(word)
        else:
            words.append(word)
    return words, apart | ({"files": files} if files else {})


# command -> the module, function and section of its keys
COMMANDS = {
    "certify": ("certify.stage.cli", "certify", "Keys"),
    "evaluate": ("certify.evaluation.cli", "evaluate", "Keys"),
    "analyse": ("certify.papers.cli", "analyse", "AnalyseKeys"),
    "features": ("certify.papers.cli", "features", "FeaturesKeys"),
    "image": ("certify.photos.cli", "image", "ImageKeys"),
    "serve": ("certify.photos.cli", "serve", "ServeKeys"),
    "submit": ("certify.leaderboard.cli", "submit", "SubmitKeys"),
    "check": ("certify.leaderboard.cli", "check", "CheckKeys"),
}
WITH_FILES = ("image", "check")  # commands whose words may name files

if __name__ == "__main__":
    main(sys.argv[1:])
