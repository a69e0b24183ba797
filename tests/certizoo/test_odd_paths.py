"""Odd paths and names at every door that takes one end in a one-line error, or work.

A door is a key of a command whose type is text, or an option of a parser without choices: `doors` lists them from the
schema and from the parsers, so that a new key or option is tried here. Work that takes seconds is replaced.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zoo
from certify import explain_command
from certify.__main__ import COMMANDS, WITH_FILES
from certify.__main__ import main as certify
from certizoo import UserError
from certizoo.config.compose import compose_config
from certizoo.config.schema import as_path, words_of
from certizoo.registry import __main__ as registry
from certizoo.shards import __main__ as shards
from docs.generate.commands import commands_of, parsers
from tests.tools.config_sections import SECTIONS
from tests.tools.launching import ROOT, TINY
from tests.tools.odd_images import drawn
from trainers import entry
from trainers.job.folder import held
from trainers.job.stages import prepare_first
from tuning import __main__ as tune
from zoo import __main__ as models

TEXT = ("text", "path", "name", "URL")  # words of the types of such keys
PARTS = [
    "", " ", ".", "..", "~", "~nobody", "a", "a=b", "a,b", "{a,b}", "[r]", "[/b]", "*", "**", "?", "$x", "${x}", "%s",
    "-rf", "'", '"', "\\", "a b", "a\tb", "a\nb", "a\0b", "\x1b[2J", "\u202e", "\ud800", "日本", "é" * 128, "x" * 256,
    "CON", "null", "1e3", "a:b", ":a", "http:", "s3:", "pipe:", "file", "file.tar", "empty", "handover", "a@b", "a@@",
    "#", "(", "!", "&",
]  # fmt: skip
ODD = st.one_of(
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=3).map("/".join),
    st.sampled_from(["/proc/none/x", "/dev/null/x", "file/x", "x/" * 3000]),
    st.text(max_size=12),
)


@dataclass(frozen=True)
class Door:
    """A place in a command line that takes text."""

    name: str
    run: Callable[[list[str]], object]
    words: Callable[[str], list[str]]  # the command line with this text in the place


class Begins(UserError):
    """The work would begin: nothing is wrong before it."""


def begins(*_: object, **__: object) -> Any:
    raise Begins("work begins")


# Values with which a command gets as far as possible: keys of configurations, then options of parsers.
SUBJECT = ["handover=handover", "data=digits", "data.root=digits", "images=10"]
BASE = {
    "image": ["handover=handover", "a.png"], "serve": ["handover=handover", "port=0"], "submit": ["results=empty"],
    "check": [str(ROOT / "leaderboard" / "cert_vit_c10.json"), "data.root=digits"],
}  # fmt: skip
GIVEN = {
    "source": "images", "root": "made", "dataset": "CIFAR10", "name": "a", "split": "train", "space": "msvp",
    "checkpoint": "handover/model.safetensors", "model": "spec_vit_digits", "out": "made", "handover": "handover",
    "format": "safetensors", "reference": "a/1", "references": "a/1", "to": "made", "storage": "tune",
}  # fmt: skip


# What a command does once everything is right
WORK = (
    "certify.stage.run.run", "certify.evaluation.run.run", "certify.papers.analysis.run",
    "certify.papers.feature_report.run", "certify.leaderboard.recheck.check", "certify.photos.cli.serve_forever",
    "certify.photos.predict.Predictor.__call__", "certify.explanation.explain", "tuning.__main__.run",
    "zoo.models.pretrained._from_tag", "zoo.weights.fetch.fetched", "certizoo.registry.server.ui.serve",
    "certizoo.shards.writing.sources.torchvision_set",
)  # fmt: skip


def trained(name: str, words: list[str]) -> None:
    def prepared(config: dict[str, Any]) -> None:
        with held(prepare_first(config).run_dir):
            begins()

    entry.main(name, words, lambda name, overrides: prepared(compose_config(name, overrides)))


def keys() -> Iterator[Door]:
    for name, section in SECTIONS.items():
        for key, words in words_of(section).items():
            if any(word in words.split() or f"{word}s" in words.split() for word in TEXT):
                yield key_of_command(name, key) if name in COMMANDS else key_of_trainer(name, key)


def key_of_command(name: str, key: str) -> Door:
    own = [word for word in [name, *BASE.get(name, SUBJECT)] if not word.startswith(f"{key}=")]
    positional = name in WITH_FILES and key == "files"
    return Door(f"{name} {key}", certify, lambda odd: [*own, odd if positional else f"{key}={odd}"])


def key_of_trainer(name: str, key: str) -> Door:
    base = [*TINY, "data.root=digits", "name=a"]
    return Door(f"{name} {key}", lambda words: trained(name, words), lambda odd: [*base, f"{key}={odd}"])


RUN: dict[str, Callable[[list[str]], object]] = {
    "certizoo shards": shards.main, "python -m zoo": models.main, "certizoo explain": explain_command.main,
    "tune.py": tune.main, "certizoo registry": registry.main,
}  # fmt: skip


def options() -> Iterator[Door]:
    for program in parsers():
        for name, parser in (commands_of(program) or {"": program}).items():
            for action in parser._actions:
                if action.nargs != 0 and not action.choices and action.dest != "help":
                    yield option(program.prog, name, parser, action)


def option(program: str, name: str, parser: argparse.ArgumentParser, action: argparse.Action) -> Door:
    before = [name] if name else []
    return Door(f"{program} {name} {action.dest}", RUN[program], lambda odd: [*before, *line(parser, action, odd)])


def line(parser: argparse.ArgumentParser, action: argparse.Action, odd: str) -> list[str]:
    """Return a command line with the required options and `odd` for one of them."""
    found = []
    for each in parser._actions:
        flag = each.option_strings[-1:]
        if each is action:
            found += [f"{flag[0]}={odd}"] if flag and each.nargs is None else [*flag, odd]
        elif each.dest in GIVEN and (each.required or each.dest in ("space", "storage")):
            found += [*flag, GIVEN[each.dest]]
    return found


DOORS = [*keys(), *options()]


@pytest.fixture(scope="module")
def here(digits: Path, tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[Path]:
    """Stand in a deep folder with what the command lines name."""
    root = tmp_path_factory.mktemp("odd") / "1" / "2" / "3" / "4"
    (root / "empty").mkdir(parents=True)
    (root / "digits").symlink_to(digits)
    (root / "images" / "a").mkdir(parents=True)
    for name in ("a.png", "images/a/1.png"):
        drawn("L").save(root / name)
    (root / "file").write_text("no file of any kind")
    model = {"name": "spec_vit_digits"}
    zoo.handover.save(root / "handover", zoo.create_model("spec_vit_digits"), model, {"seed": 0})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("HOME", str(root / "home"))
        patch.setenv("CERTIZOO_CACHE", str(root / "cache"))
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{empty_database}")
        for place in WORK:
            patch.setattr(place, begins)
        yield root


def one_line(door: Door, odd: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Go through the door. Any exception but the end of a command with one line fails the test."""
    status: object = 0
    capsys.readouterr()
    try:
        door.run(door.words(odd))
    except SystemExit as left:
        status = left.code
    said = capsys.readouterr().err
    assert status in (None, 0, 2), (door.name, odd, said)
    assert status != 2 or ("error: " in said.splitlines()[-1] and "Traceback" not in said), (door.name, odd, said)


@pytest.mark.parametrize("examples", [15, pytest.param(500, marks=pytest.mark.slow)])
def test_odd_paths_and_names_are_one_line(examples: int, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @given(st.sampled_from(DOORS), ODD)
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    def tried(door: Door, odd: str) -> None:
        one_line(door, odd, capsys)

    tried()


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_every_door_refuses_what_is_no_path(door: Door, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for odd in ("", "~nobody/x", "a\0b", "x" * 300, "/dev/null/x", "file/x", "日本/ß=b", "[r]", "-rf"):
        one_line(door, odd, capsys)


def test_options_that_are_paths_have_their_type() -> None:
    """`type=Path` would take '' for the current folder and leave `~` as it is."""
    assert not [
        (program.prog, action.dest)
        for program in parsers()
        for parser in (program, *commands_of(program).values())
        for action in parser._actions
        if action.type is Path
    ]
    assert as_path(f"{os.sep}a") == Path("/a")
