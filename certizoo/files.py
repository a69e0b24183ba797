"""Files that appear whole or not at all, even after a kill or on a full disk; their names and digests."""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from certizoo.errors import UserError

# Not a folder, hidden file, option, home or Windows device, and no characters special to a shell or URL.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,199}")
DEVICES = re.compile(r"(?i)(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?")


def require_file_name(name: object, key: str) -> None:
    """Raise UserError unless `name`, the value of `key`, is a valid file or folder name on every system."""
    fits = isinstance(name, str) and NAME.fullmatch(name) and not DEVICES.fullmatch(name) and not name.endswith(".")
    if not fits:
        raise UserError(
            f"{key}={str(name)[:80]!r} is not a valid folder name; use up to 200 letters, digits and _.+=@-"
        )


def cache_folder(kind: str) -> Path:
    """Return the folder of this user's copies of one kind: in CERTIZOO_CACHE, else in the system's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("CERTIZOO_CACHE") or Path(base) / "certizoo") / kind


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary name to write to; rename it once it is on disk, and only without an error.

    An OSError names the file.
    """
    part = path.with_name(path.name + ".part")
    try:
        yield part
        with part.open("r+b") as file:  # Windows flushes only what may be written
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # `write` raises errors without a name
            error.filename = str(path)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write the text, whole or not at all."""
    with whole_file(path) as part:
        part.write_text(text)


def sha256(path: Path) -> str:
    """Return the digest of the file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def no_link(path: str, flags: int) -> int:
    """Open without following links (`open(..., opener=no_link)`): a link could lead to any file of the user."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)  # Windows has no such flag


@contextmanager
def disk_errors(fix: str) -> Iterator[None]:
    """Turn a disk error in the block into one line with the file and `fix`, which says what to do."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(f"{error.filename or 'a file'} cannot be written or read ({reason}); {fix}") from error
