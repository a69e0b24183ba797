"""Models that a function of the user's own code makes: `MODULE:FUNCTION` in place of a name of the zoo.

Such a name is code, and a hand-over may come from anybody. Only the function that the command line of this process
names is called: `trust` notes it, and worker processes are told.
"""

import importlib
import inspect
import sys
from typing import Any

from torch import nn

from certizoo import UserError

_trusted: set[str] = set()  # of this process


def is_function(name: str) -> bool:
    """Return True for MODULE:FUNCTION."""
    return ":" in name


def trust(*names: str) -> None:
    """Allow this process to call each MODULE:FUNCTION."""
    _trusted.update(names)


def trusted() -> tuple[str, ...]:
    """Return what this process may call, for its workers."""
    return tuple(sorted(_trusted))


def from_function(name: str) -> nn.Module:
    """Return what MODULE:FUNCTION makes, the module looked up in this folder first.

    An error inside the function is the user's own and passes.

    Raises:
        UserError: it is not trusted, cannot be called, or makes no nn.Module.
    """
    if name not in _trusted:
        raise UserError(
            f"{name[:200]} is code that a hand-over names; if it is your own, pass model=MODULE:FUNCTION in its place, "
            "on this machine"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    module, _, function = name.partition(":")
    try:
        make: Any = getattr(importlib.import_module(module), function)
        inspect.signature(make).bind()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        advice = "write MODULE:FUNCTION, a function without arguments in a module that can be imported here"
        raise UserError(f"{name} cannot be called: {error}; {advice}") from None
    made = make()
    if not isinstance(made, nn.Module):
        raise UserError(f"{name} makes a {type(made).__name__}; it must return a torch.nn.Module")
    return made
