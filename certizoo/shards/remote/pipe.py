"""Shards printed by a command: `data.root='pipe:aws s3 cp s3://bucket/imagenet/{shard} -'`.

There is no shell: the command is split into words once, and the shard's name replaces {shard} inside its word. Only
programs that this machine's user lists in CERTIZOO_PIPES (`CERTIZOO_PIPES=aws,gsutil`) run. A command that only the
config of a hand-over names never runs (`shards.config.from_elsewhere`).
"""

import os
import selectors
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import UnsupportedOperation
from typing import IO

from certizoo import UserError
from certizoo.processes import end_group
from certizoo.shards.format.config import PIPE

SLOT = "{shard}"
ALLOWED = "CERTIZOO_PIPES"
CHUNK = 2**20
LAST_WORDS = 200  # bytes of a failing command's stderr


class CommandError(OSError):
    """The command failed: the shard may be absent, or the network down."""


@dataclass(frozen=True)
class Pipe:
    """The command `root`. `timeout`: seconds to wait for its next bytes."""

    root: str
    timeout: int

    def __post_init__(self) -> None:
        words = self._words()
        if not words or SLOT not in self.root or SLOT in words[0]:
            raise UserError(f"data.root={self.root}is not a command for a shard; use {PIPE}PROGRAM ARGUMENTS {SLOT}")
        if words[0] not in os.environ.get(ALLOWED, "").split(","):
            raise UserError(
                f"data.root runs the program {words[0]!r}, which is not allowed; to allow it, set {ALLOWED}={words[0]}"
            )
        if shutil.which(words[0]) is None:
            raise UserError(f"data.root={self.root}: the program {words[0]!r} is not installed; install it")

    def _words(self) -> list[str]:
        try:
            return shlex.split(self.root.removeprefix(PIPE))
        except ValueError as error:
            raise UserError(f"data.root={self.root}: {error}; correct the quotes") from None

    def where(self, name: str) -> str:
        return self.root.replace(SLOT, name)

    def sizes(self, names: Sequence[str]) -> None:
        """Return None: a command cannot list sizes, so each shard is checked on arrival."""

    def chunks(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Iterate over the command's output, all of it.

        Raises `CommandError`, TimeoutError if it stays silent, UnsupportedOperation if a part is asked for.
        """
        if end is not None:
            raise UnsupportedOperation("a command sends whole files only")
        words = [word.replace(SLOT, name) for word in self._words()]
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
            try:
                assert process.stdout is not None
                yield from self._printed(process.stdout)
                if status := process.wait(self.timeout):
                    raise CommandError(f"exit status {status}: {_end(errors)}")
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"did not end within {self.timeout} s") from None
            finally:
                end_group(process, patience=1)
                process.stdout.close()  # type: ignore[union-attr]

    def _printed(self, stdout: IO[bytes]) -> Iterator[bytes]:
        with selectors.DefaultSelector() as ready:
            ready.register(stdout, selectors.EVENT_READ)
            while ready.select(self.timeout):
                if not (chunk := os.read(stdout.fileno(), CHUNK)):
                    return
                yield chunk
        raise TimeoutError(f"nothing came for {self.timeout} s")


def _end(errors: IO[bytes]) -> str:
    errors.seek(max(errors.seek(0, os.SEEK_END) - LAST_WORDS, 0))
    return " ".join(errors.read().decode("utf-8", "replace").split())
