"""`certizoo COMMAND ...`, the one program of an installed package: every command as `python -m` has it in a checkout.

It imports nothing of the project: a command is started by its name, in this process, and `train` by DeepSpeed's
launcher in the place of this process, so that signals and exit statuses are its own.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from certizoo import UserError, __version__
from certizoo.errors import one_line_errors
from certizoo.nearest import unknown

# command -> the module that it is, and what it does
COMMANDS = {
    "zoo": ("zoo", "models: what there is, what is proved of their weights; export"),
    "shards": ("shards", "data sets as shards"),
    "certify": ("certify", "certificates, attacks beside them, photographs, the leaderboard"),
    "registry": ("registry", "certified versions in MLflow"),
    "tune": ("tune", "searches with Ray Tune"),
    "doctor": ("trainers.doctor", "what this machine can train"),
    "reshape": ("trainers.reshape", "a run for another number of ranks"),
}
TRAIN = "train"
SCRIPTS = ("adv_train", "std_train", "constrain")  # of trainers/; the first where none is named
LAUNCHER = "deepspeed.launcher.runner"  # what the command `deepspeed` runs


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run one command. Exit status 2: an error of one line."""
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
    else:
        sys.argv = [f"certizoo {words[0]}", *words[1:]]
        runpy.run_module(COMMANDS[words[0]][0], run_name="__main__", alter_sys=True)


def usage() -> str:
    lines = {f"{TRAIN} [{'|'.join(SCRIPTS)}]": "training by DeepSpeed's launcher, whose flags come first"}
    lines |= {name: words for name, (_, words) in COMMANDS.items()}
    return "".join(["certizoo COMMAND ...\n\n", *(f"  {name:38}{words}\n" for name, words in lines.items())])


def launcher(words: Sequence[str]) -> list[str]:
    """`deepspeed FLAGS trainers/SCRIPT.py OVERRIDES` of FLAGS [SCRIPT] OVERRIDES. A flag may have a value behind it:
    the first word that is a script or sets a key ends them."""
    ends = [place for place, word in enumerate(words) if word in SCRIPTS or ("=" in word and not word.startswith("-"))]
    first = ends[0] if ends else len(words)
    flags, rest = list(words[:first]), list(words[first:])
    name = rest.pop(0) if rest and rest[0] in SCRIPTS else SCRIPTS[0]
    package = find_spec("trainers")
    if package is None or not package.submodule_search_locations or find_spec("deepspeed") is None:
        raise UserError("training needs deepspeed, which is not installed here; pip install certizoo")
    script = Path(next(iter(package.submodule_search_locations))) / f"{name}.py"
    return [sys.executable, "-m", LAUNCHER, *flags, str(script), *rest]


if __name__ == "__main__":
    main()
