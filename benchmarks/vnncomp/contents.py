"""The bytes of a benchmark's files, plain or as .gz, with a size limit: they come from someone else."""

import gzip
import zlib
from pathlib import Path

from certizoo import UserError

MAX_BYTES = 16 * 2**20  # fifty times the largest net of the benchmark


def content(folder: Path, name: str) -> bytes:
    """Return the bytes of the file `name` below `folder`, or of NAME.gz unpacked.

    Raises:
        UserError: the file does not exist, leads out of the folder or is larger than MAX_BYTES.
    """
    try:
        found = _found(folder, name)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{name[:200]} of {folder} cannot be read ({reason}); fetch it again") from None
    if len(found) > MAX_BYTES:
        raise UserError(f"{name} holds more than {MAX_BYTES // 2**20} MiB, which no file of this benchmark does")
    return found


def _found(folder: Path, name: str) -> bytes:
    """Read at most one byte more than MAX_BYTES."""
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    if path is None:
        raise UserError(
            f"{folder / name} does not exist, with or without .gz; give the folder that holds instances.csv"
        )
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{path} points outside {folder}; put the file itself there")
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return file.read(MAX_BYTES + 1)
