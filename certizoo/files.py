"""Files that appear whole or not at all, whatever kills the process or fills the disk."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give another name to write to; the file takes its own name once it is on the disk, and only without an error."""
    part = path.with_name(path.name + ".part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """`path.write_text(text)`, whole or not at all."""
    with whole_file(path) as part:
        part.write_text(text)
