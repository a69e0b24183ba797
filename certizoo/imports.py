"""Cheaper large imports. A rank's imports create half a million objects, which live as long as the process."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """Pause garbage collection during the imports at the start of a process.

    It would visit all objects again and again while modules are created, and once more at the end of the process. With
    `gc.freeze` it never visits the existing ones again. Reference counts free memory as usual.
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
    """Let `import library` raise ImportError in the block, unless it was imported before.

    This is for a library that another one imports optionally and that nobody calls there. (None in sys.modules: the
    language reference, 5.3.1.)
    """
    if library in sys.modules:
        yield
        return
    sys.modules[library] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[library]
