"""`certizoo COMMAND` has every command, and `train` is the documented command of the launcher."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from certizoo import __main__ as program
from certizoo import __version__
from certizoo.extras import EXTRAS
from tests.tools.launching import ROOT


@pytest.mark.parametrize("name", program.COMMANDS)
def test_every_command_is_a_module_that_can_be_started(name: str) -> None:
    module = program.COMMANDS[name][0]
    found = find_spec(module)
    assert found is not None
    assert not found.submodule_search_locations or find_spec(f"{module}.__main__")


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["+model=spec_vit_b"], ["adv_train", "+model=spec_vit_b"]),
        (["std_train", "+model=x", "name=a"], ["std_train", "+model=x", "name=a"]),
        (["--num_gpus", "2", "constrain", "a=1"], ["--num_gpus", "2", "constrain", "a=1"]),
        (["--port=1", "--num_gpus", "2", "a=1"], ["--port=1", "--num_gpus", "2", "adv_train", "a=1"]),
        ([], ["adv_train"]),
    ],
)  # fmt: skip
def test_train_is_deepspeed_with_the_script(words: list[str], command: list[str]) -> None:
    scripts = {name: str(ROOT / "trainers" / f"{name}.py") for name in program.SCRIPTS}
    assert program.launcher(words) == [
        sys.executable, "-m", program.LAUNCHER, *(scripts.get(word, word) for word in command)
    ]  # fmt: skip
    assert all(Path(script).is_file() for script in scripts.values())


def test_it_lists_its_commands_and_corrects_a_wrong_one(capsys: pytest.CaptureFixture[str]) -> None:
    program.main([])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("train", *program.COMMANDS))
    program.main(["--version"])
    assert capsys.readouterr().out == f"certizoo {__version__}\n"
    with pytest.raises(SystemExit) as left:
        program.main(["certfy"])
    assert left.value.code == 2
    assert "certify" in capsys.readouterr().err


def test_every_package_says_that_it_is_typed() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks", "docs"}
    assert packages == {path.parent.name for path in ROOT.glob("*/py.typed")}


@pytest.mark.parametrize("name", ["shards", "registry"])
def test_a_module_of_earlier_versions_names_the_command_and_runs_it(name: str) -> None:
    words = [sys.executable, "-m", name, "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, f"python -m {name} is now: certizoo {name}\n")
    assert done.stdout.startswith("usage:")


def test_a_command_without_its_extra_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "find_spec", lambda library: None)
    for command, library in program.NEEDS.items():
        with pytest.raises(SystemExit):
            program.main([command])
        said = capsys.readouterr().err
        assert said.startswith(f"error: {command} needs {library}, which is not installed here; pip install ")
        assert said.endswith(f"'certizoo[{EXTRAS[library]}]'\n")
