"""The exception for faults that the user of a command can correct."""

import os
import select
import sys
from collections.abc import Callable
from functools import wraps
from typing import NoReturn, ParamSpec, TypeVar

from certizoo.extras import EXTRAS, advice
from certizoo.text import plain

P = ParamSpec("P")
R = TypeVar("R")

EXIT_USER_ERROR = 2
EXIT_BROKEN_PIPE = 128 + 13  # as of a program ended by SIGPIPE
STDOUT = 1


class UserError(Exception):
    """A fault of input, configuration or environment.

    The message is one line: what is wrong, then what to do. It may quote texts from outside; control characters in them
    are escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(plain(" ".join(message.split())))


def one_line_errors(main: Callable[P, R]) -> Callable[P, R]:
    """Decorate an entry point: print a `UserError` as one line on stderr and exit with status 2.

    The same holds for a file that the system refuses, and for a library of an extra that is not installed. The program
    ends quietly if its reader has closed the pipe (`... | head`).
    """

    @wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return main(*args, **kwargs)
        except UserError as error:
            _exit(error)
        except ModuleNotFoundError as error:
            library = (error.name or "").partition(".")[0]
            if library not in EXTRAS:
                raise
            _exit(UserError(f"this needs {library}, which is not installed; {advice(library)}"))
        except BrokenPipeError:
            if not _reader_has_left():
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # Python flushes the rest at exit
            raise SystemExit(EXIT_BROKEN_PIPE) from None
        except OSError as error:
            if error.filename is None:  # no file
                raise
            _exit(UserError(f"{error.filename} cannot be read or written ({error.strerror}); choose another path"))

    return wrapped


def _exit(error: UserError) -> NoReturn:
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
    raise SystemExit(EXIT_USER_ERROR) from None


def _reader_has_left() -> bool:
    """Return True if stdout is a pipe without a reader."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
