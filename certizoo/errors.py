"""The one exception that is meant for the person who typed the command."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from certizoo.text import plain

P = ParamSpec("P")
R = TypeVar("R")

EXIT_USER_ERROR = 2


class UserError(Exception):
    """A fault of input, configuration or surroundings. The message is one line: what is wrong, and the mend. It may
    quote texts from outside: nothing in it acts on a terminal."""

    def __init__(self, message: str) -> None:
        super().__init__(plain(" ".join(message.split())))


def one_line_errors(main: Callable[P, R]) -> Callable[P, R]:
    """Entry points: print a `UserError` as one line on stderr and exit with status 2."""

    @wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return main(*args, **kwargs)
        except UserError as error:
            sys.stderr.write(f"error: {error}\n")
            sys.stderr.flush()
            raise SystemExit(EXIT_USER_ERROR) from None

    return wrapped
