"""The one exception that is meant for the person who typed the command."""

import os
import select
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from certizoo.text import plain

P = ParamSpec("P")
R = TypeVar("R")

EXIT_USER_ERROR = 2
EXIT_BROKEN_PIPE = 128 + 13  # as of a program that SIGPIPE ends
STDOUT = 1


class UserError(Exception):
    """A fault of input, configuration or surroundings. The message is one line: what is wrong, and the mend. It may
    quote texts from outside: nothing in it acts on a terminal."""

    def __init__(self, message: str) -> None:
        super().__init__(plain(" ".join(message.split())))


def one_line_errors(main: Callable[P, R]) -> Callable[P, R]:
    """Entry points: print a `UserError` as one line on stderr and exit with status 2; end quietly where nobody reads
    on (`... | head`)."""

    @wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return main(*args, **kwargs)
        except UserError as error:
            sys.stderr.write(f"error: {error}\n")
            sys.stderr.flush()
            raise SystemExit(EXIT_USER_ERROR) from None
        except BrokenPipeError:
            if not _reader_has_left():
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # Python flushes what is left when it ends
            raise SystemExit(EXIT_BROKEN_PIPE) from None

    return wrapped


def _reader_has_left() -> bool:
    """Of stdout, if that is a pipe."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
