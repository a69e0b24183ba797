"""Models that a function of the user's own code makes: `MODULE:FUNCTION` in place of a name of the zoo.

Such a name is code, and a hand-over may come from anybody. Only the function that the command line of this process
names is called: `trust` notes it in the environment, which worker processes inherit.
"""

import importlib
import inspect
import os
import sys
from typing import Any

from torch import nn

from certizoo import UserError

TRUSTED = "CERTIZOO_MODEL"  # environment


def is_function(name: str) -> bool:
    """Return True for MODULE:FUNCTION."""
    return ":" in name


def trust(name: str) -> None:
    """Allow this process and its workers to call MODULE:FUNCTION."""
    os.environ[TRUSTED] = name


def from_function(name: str) -> nn.Module:
    """Return what MODULE:FUNCTION makes, the module looked up in this folder first.

    An error inside the function is the user's own and passes.

    Raises:
        UserError: it is not trusted, cannot be called, or makes no nn.Module.
    """
    if os.environ.get(TRUSTED) != name:
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
        raise UserError(f"{name} cannot be called ({error}); write MODULE:FUNCTION") from None
    made = make()
    if not isinstance(made, nn.Module):
        raise UserError(f"{name} makes a {type(made).__name__}; it must return a torch.nn.Module")
    return made
