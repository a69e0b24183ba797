"""Files that appear whole or not at all, whatever kills the process or fills the disk; their names and digests."""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from certizoo.errors import UserError

# No folder, nothing hidden, no option, no home, no device of Windows, nothing that a shell or a URL reads otherwise.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,199}")
DEVICES = re.compile(r"(?i)(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?")


def require_file_name(name: object, key: str) -> None:
    """Raise UserError unless `name`, the value of `key`, is one file or folder of its folder on every system."""
    fits = isinstance(name, str) and NAME.fullmatch(name) and not DEVICES.fullmatch(name) and not name.endswith(".")
    if not fits:
        raise UserError(f"{key}={str(name)[:80]!r} is no name of a folder; use up to 200 letters, digits and _.+=@-")


def cache_folder(kind: str) -> Path:
    """Where this user's copies of one kind are kept: in CERTIZOO_CACHE, else in the cache that the system names."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("CERTIZOO_CACHE") or Path(base) / "certizoo") / kind


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


def sha256(path: Path) -> str:
    """Of the file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def no_link(path: str, flags: int) -> int:
    """For `open(..., opener=no_link)`: a link in a folder from elsewhere may lead to any file of ours."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def disk_errors(mend: str) -> Iterator[None]:
    """What a disk refuses within the block, as one line with the file and the mend."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(f"{error.filename or 'a file'} cannot be written or read ({reason}); {mend}") from error
