"""`certizoo COMMAND ...`, the single program of an installed package, with every command of `python -m`.

It imports no command itself. A command runs by its module name in this process. `train` replaces this process by
DeepSpeed's launcher, so that signals and exit statuses are the launcher's own.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from certizoo import UserError, __version__
from certizoo.errors import one_line_errors
from certizoo.extras import advice
from certizoo.nearest import unknown

# command -> its module and description
COMMANDS = {
    "zoo": ("zoo", "list models and what is proved of their weights; import, export"),
    "shards": ("certizoo.shards", "data sets as shards"),
    "certify": ("certify", "certify, evaluate with attacks, certify photographs, the leaderboard"),
    "explain": ("certify.explain_command", "layers of any model: rules or what is missing, norms, shares of the loss"),
    "registry": ("certizoo.registry", "browse certified versions in MLflow"),
    "tune": ("tuning", "search with Ray Tune"),
    "doctor": ("trainers.doctor", "check what this machine can train"),
}
# command -> a library of the extra that it needs; the others name what they miss when they use it
NEEDS = {"doctor": "deepspeed", "registry": "mlflow", "tune": "ray"}
TRAIN = "train"
SCRIPTS = ("adv_train", "std_train", "constrain")  # of trainers/; the first is the default
LAUNCHER = "deepspeed.launcher.runner"  # the module of the command `deepspeed`


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run one command. Exit status 2 after a one-line error."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
    elif words[0] in ("-V", "--version"):
        sys.stdout.write(f"certizoo {__version__}\n")
    elif words[0] == TRAIN:
        command = launcher(words[1:])
        sys.stdout.flush()
        os.execv(command[0], command)
    elif words[0] not in COMMANDS:
        raise unknown("command", words[0], [TRAIN, *COMMANDS])
    elif find_spec(NEEDS.get(words[0], "certizoo")) is None:
        raise UserError(f"{words[0]} needs {NEEDS[words[0]]}, which is not installed here; {advice(NEEDS[words[0]])}")
    else:
        sys.argv = [f"certizoo {words[0]}", *words[1:]]
        runpy.run_module(COMMANDS[words[0]][0], run_name="__main__", alter_sys=True)


def usage() -> str:
    lines = {f"{TRAIN} [{'|'.join(SCRIPTS)}]": "train with DeepSpeed's launcher; its flags come first"}
    lines |= {name: words for name, (_, words) in COMMANDS.items()}
    return "".join(["certizoo COMMAND ...\n\n", *(f"  {name:38}{words}\n" for name, words in lines.items())])


def launcher(words: Sequence[str]) -> list[str]:
    """Turn FLAGS [SCRIPT] OVERRIDES into `deepspeed FLAGS trainers/SCRIPT.py OVERRIDES`.

    A flag may have a value: the first word that is a script or sets a key ends the flags.
    """
    ends = [place for place, word in enumerate(words) if word in SCRIPTS or ("=" in word and not word.startswith("-"))]
    first = ends[0] if ends else len(words)
    flags, rest = list(words[:first]), list(words[first:])
    name = rest.pop(0) if rest and rest[0] in SCRIPTS else SCRIPTS[0]
    package = find_spec("trainers")
    if package is None or not package.submodule_search_locations or find_spec("deepspeed") is None:
        raise UserError(f"training needs deepspeed, which is not installed here; {advice('deepspeed')}")
    script = Path(next(iter(package.submodule_search_locations))) / f"{name}.py"
    return [sys.executable, "-m", LAUNCHER, *flags, str(script), *rest]


if __name__ == "__main__":
    main()
