"""Files that appear whole or not at all, whatever kills the process or fills the disk."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from certizoo.errors import UserError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give another name to write to; the file takes its own name once it is on the disk, and only without an error. An
    OSError says which file it is of."""
    part = path.with_name(path.name + ".part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # what `write` raises names nothing
            error.filename = str(path)
        raise


def write_whole(path: Path, text: str) -> None:
    """`path.write_text(text)`, whole or not at all."""
    with whole_file(path) as part:
        part.write_text(text)


@contextmanager
def disk_errors(mend: str) -> Iterator[None]:
    """What a disk refuses within the block, as one line with the file and the mend."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(f"{error.filename or 'a file'} cannot be written ({reason}); {mend}") from error
