"""Loaded first on PYTHONPATH by Python itself: a process that begins to read a pickle ends and reports where."""

import _pickle
import os
import pickle
import sys
import traceback
from typing import Any

STATUS = 77


def refuse(*_: Any, **__: Any) -> Any:
    sys.stderr.write("a pickle was read:\n")
    traceback.print_stack()
    sys.stderr.flush()
    os._exit(STATUS)


class Unpickler(_pickle.Unpickler):
    load = refuse


setattr(pickle._Unpickler, "load", refuse)  # noqa: B010  (mypy: a method is no variable)
for module in (pickle, _pickle):
    for name, value in {"load": refuse, "loads": refuse, "Unpickler": Unpickler}.items():
        setattr(module, name, value)
