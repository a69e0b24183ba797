"""The commands and programs of the site's pages, and a copy of the project to run them in.

A comment directly above a fenced block of `sh` or `python` says how it runs:

    <!-- runs: fast -->                  in the normal suite, in seconds
    <!-- runs: slow -->                  by `make test-slow`, after the blocks above it on its page
    <!-- runs: slow, with NAME -->       the same, with the stand-in NAME of tests/docs/standins.py
    <!-- runs: slow, until URL -->       the same, in the background, for the rest of the page, once URL answers
    <!-- runs: not here: REASON -->      never
    <!-- file: PATH -->                  not a command: the reader writes it to PATH, and so does the test
"""

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from certizoo.ports import free_port
from certizoo.processes import end_group
from tests.tools.folders import FOLDERS
from tests.tools.launching import ROOT, environment

FENCE = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<mark>[^\n]*?) -->\n(?P=indent))?"
    r"```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.M | re.S,
)
MARK = re.compile(
    r"runs: (?:(?P<speed>fast|slow)(?:, with (?P<standin>\w+))?(?:, until (?P<url>\S+))?|not here: (?P<reason>.+))"
    r"|file: (?P<file>\S+)"
)
RUN = {"sh", "python"}
SHOWN = {"text", "toml", "yaml"}  # blocks of output and files
ANSWER_SECONDS = 60.0


@dataclass(frozen=True)
class Snippet:
    """A fenced block. `speed` is "fast", "slow" or ""; `file` is the path to write it to instead of running it."""

    page: str
    line: int
    language: str
    text: str
    speed: str = ""
    reason: str = ""
    file: str = ""
    standin: str = ""
    url: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets(page: str, text: str) -> list[Snippet]:
    """Return all blocks of a page in their order.

    Raises ValueError for a block that does not say how it runs.
    """
    found = []
    for fence in FENCE.finditer(text):
        line = text[: fence.start()].count("\n") + 1
        found.append(_snippet(f"{page}:{line}", fence, page, line))
    return found


def _snippet(where: str, fence: "re.Match[str]", page: str, line: int) -> Snippet:
    language, mark = fence["language"], fence["mark"]
    said = None if mark is None else MARK.fullmatch(mark)
    if language not in RUN | SHOWN:
        raise ValueError(f"{where}: a block of {language or 'no language'}; use {', '.join(sorted(RUN | SHOWN))}")
    if said is None and (language in RUN or (mark or "").startswith(("runs:", "file:"))):
        raise ValueError(f"{where}: how does it run? Write <!-- runs: fast --> or another mark directly above it")
    words = {} if said is None else {key: value or "" for key, value in said.groupdict().items()}
    indent = len(fence["indent"])
    body = "".join(row[indent:] if row.strip() else "\n" for row in fence["text"].splitlines(keepends=True))
    return Snippet(page, line, language, body, **words)


@dataclass
class Room:
    """A copy of the project in `folder`, where a page's blocks run one after the other."""

    folder: Path
    behind: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def run(self, snippet: Snippet, standins: Mapping[str, Callable[[Path], None]]) -> str:
        """Run a block and return its output.

        Raises AssertionError where it fails.
        """
        if snippet.file:
            path = self.folder / snippet.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(snippet.text)
        if snippet.file or not snippet.speed:
            return ""
        if snippet.standin:
            standins[snippet.standin](self.folder)
        command = ["bash", "-euo", "pipefail", "-c"] if snippet.language == "sh" else ["python", "-c"]
        process = subprocess.Popen(
            [*command, snippet.text], cwd=self.folder, env=self._environment(), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL if snippet.url else subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        if snippet.url:
            self.behind.append(process)
            wait_for(snippet.url, process)
            return ""
        try:
            output = process.communicate()[0].decode(errors="replace")
        finally:
            end_group(process)
        assert process.returncode == 0, f"{snippet} ends with {process.returncode}:\n{snippet.text}\n{output[-6000:]}"
        return output

    def close(self) -> None:
        """End the background processes."""
        for process in self.behind:
            end_group(process)

    def _environment(self) -> dict[str, str]:
        return environment() | {
            "PATH": f"{self.folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder), "COLUMNS": "160", "CERTIZOO_CACHE": str(self.folder / "cache"),
        }  # fmt: skip


def room(folder: Path) -> Room:
    """Copy the project, with an environment that `make install` accepts as finished."""
    for name in [*FOLDERS, "configs", "cluster", "benchmarks"]:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tune.py", "Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy2(ROOT / name, folder / name)
    virtual_environment(folder / ".venv")
    return Room(folder)


def virtual_environment(folder: Path) -> None:
    """Make an environment like the tests' own, with a launcher that takes a free port.

    Another run may be using DeepSpeed's default port.
    """
    prefix = Path(sys.prefix)
    (folder / "bin").mkdir(parents=True)
    for path in (prefix / "bin").iterdir():
        if path.name != "deepspeed":
            (folder / "bin" / path.name).symlink_to(path)
    launcher = folder / "bin" / "deepspeed"
    launcher.write_text(
        f'#!/bin/sh\nexec "{folder}/bin/python" "{prefix}/bin/deepspeed" --master_port={free_port()} "$@"\n'
    )
    launcher.chmod(0o755)
    (folder / "lib").symlink_to(prefix / "lib")
    shutil.copy2(prefix / "pyvenv.cfg", folder)
    (folder / "installed").touch()


def wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Wait until the server answers.

    Raises AssertionError if the process ends or takes too long.
    """
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        assert process.poll() is None, f"the server of {url} ended with {process.returncode}"
        assert time.monotonic() < deadline, f"{url} does not answer"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
