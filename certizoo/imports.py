"""Large imports made cheaper. Those of a rank make half a million objects, which live as long as the process."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """Around the imports at the start of a process: Python's search for garbage waits.

    It would look through all objects again and again while modules are made, and once more at the end of the process;
    with `gc.freeze` it never looks at those again that are there now. Reference counts free memory as ever.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if on:
            gc.enable()


@contextmanager
def absent(library: str) -> Iterator[None]:
    """Within it `import library` raises ImportError, unless it has been imported before: for a library that another one
    imports where it can, and that nobody calls there. (None in sys.modules: the language reference, 5.3.1.)"""
    if library in sys.modules:
        yield
        return
    sys.modules[library] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[library]
