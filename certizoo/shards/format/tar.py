"""One walk over a shard, for both checking and reading.

webdataset's own tar stage accepts a shard cut between members, a sample without its label, a member of any size and a
name that leaves the folder. This walk refuses them, and it reads only the bytes that are requested.
"""

import gzip
import os
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from certizoo import UserError
from certizoo.images import ImageError, Pixels, pixels

MAX_MEMBER_BYTES = 64 * 2**20
MAX_LABEL_BYTES = 32
MAX_MEMBERS = 64  # of one sample
# Bytes of a header that describes the next member: a long name, or pax. Paths end at 4096 bytes on every system.
MAX_EXTENSION_BYTES = 8192
MAX_EXTENSIONS = 4  # consecutive ones; tarfile reads each inside the previous one
EXTENSIONS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
LONG_NUMBER = re.compile(rb"[0-9]{32}")  # tarfile's patterns take quadratic time in its length
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
TEXT = "txt"  # the extension of a sentence
MAX_TEXT_BYTES = 2**16
ENDINGS = (".tar", ".tar.gz", ".tgz")
GZIP = b"\x1f\x8b"
UNPACKED, MAX_RATIO = 2**26, 100  # bytes that any gzip may hold, and of larger ones how many times their size
END_OF_ARCHIVE = 1024  # bytes: two blocks of zeros close every tar
OCTAL = re.compile(rb"[0-7]+")
MEND_SHARD = "copy or write the shard again"
MEND_SAMPLE = "correct it and write the shard again (training can skip it: data.on_corrupt=skip)"


class Fetched(Protocol):
    """A shard that is fetched, perhaps only the samples first..last, and opened as a local file."""

    @property
    def name(self) -> str: ...

    def open(self, mode: Literal["rb"], first: int = 0, last: int | None = None) -> BinaryIO: ...


Shard = Path | Fetched  # `str` is for messages


class SampleError(UserError):
    """A fault of one sample. Training may skip it (`data.on_corrupt=skip`), evaluation never does."""


@dataclass(frozen=True)
class Sample:
    """An encoded image, or a sentence, and its label. `where`, 'SHARD: sample KEY', starts every error about it.

    `copy` counts how often the epoch has drawn it before; the view depends on it.
    """

    where: str
    key: str
    label: int
    image: bytes
    extension: str = ""
    copy: int = 0

    def pixels(self, channels: int) -> Pixels:
        """Return the decoded image (H, W, `channels`). Raises `SampleError`."""
        try:
            return pixels(self.image, channels)
        except ImageError as error:
            raise SampleError(f"{self.where}: {error}; {MEND_SAMPLE}") from None

    def text(self) -> str:
        """Return the sentence. Raises `SampleError`."""
        if self.extension != TEXT:
            raise SampleError(f"{self.where} has no .{TEXT} (sentence); {MEND_SAMPLE}")
        try:
            return self.image.decode()
        except UnicodeDecodeError:
            raise SampleError(f"{self.where}: .{TEXT} is not UTF-8; {MEND_SAMPLE}") from None

    def decode(self) -> None:
        """Decode the image or the sentence, to see whether that is possible. Raises `SampleError`."""
        if self.extension == TEXT:
            self.text()
        else:
            self.pixels(3)


class OpenShard:
    """A shard's file, unpacked. It closes with the last entry that refers to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def __del__(self) -> None:
        self.file.close()


@dataclass(frozen=True)
class Entry:
    """A sample still in its shard: members by extension."""

    shard: Shard
    key: str
    parts: dict[str, tarfile.TarInfo]
    opened: OpenShard
    copy: int = 0

    @property
    def where(self) -> str:
        return f"{self.shard}: sample {self.key}"

    @property
    def begin(self) -> int:
        """Return the byte at which the sample begins."""
        return next(iter(self.parts.values())).offset

    def read(self, extension: str, most: int = MAX_MEMBER_BYTES) -> bytes:
        """Return the bytes of one member.

        Raises `SampleError` if they are more than `most`, `UserError` if the shard ends early.
        """
        member = self.parts[extension]
        if member.size > most:
            raise SampleError(f"{self.where}: .{extension} holds {member.size} bytes, more than {most}; {MEND_SAMPLE}")
        data = os.pread(self.opened.file.fileno(), member.size, member.offset_data)
        if len(data) < member.size:
            raise UserError(f"{self.shard}: truncated in {member.name}; {MEND_SHARD}")
        return data

    def label(self, num_classes: int | None) -> int:
        """Return the integer of `.cls`, below `num_classes` if that is known. Raises `SampleError`."""
        if _escapes(self.key):
            raise SampleError(f"{self.where}: the member name leaves the folder; {MEND_SAMPLE}")
        if "cls" not in self.parts:
            raise SampleError(f"{self.where} has no .cls (label){self._dotted}; {MEND_SAMPLE}")
        text = self.read("cls", MAX_LABEL_BYTES).decode("ascii", "replace").strip()
        if not text.isdigit() or (num_classes is not None and int(text) >= num_classes):
            allowed = "a whole number" if num_classes is None else f"one of the labels 0..{num_classes - 1}"
            raise SampleError(
                f"{self.where}: .cls holds {text!r}, not {allowed}; correct the label (or data.num_classes)"
            )
        return int(text)

    @property
    def _dotted(self) -> str:
        """The reason, if a label's name has a dot too many: webdataset ends a sample's key at the first one."""
        found = [extension for extension in self.parts if extension.endswith(".cls")]
        return f", but .{found[0]}: a key ends at its first dot, so name its files without other dots" if found else ""

    @property
    def extension(self) -> str:
        """Return the extension of the image, or of the text of a sample without images.

        Raises `SampleError` unless the sample has exactly one image, or a text.
        """
        found = [extension for extension in self.parts if extension in IMAGE_EXTENSIONS]
        if not found and TEXT in self.parts:
            return TEXT
        if len(found) != 1:
            raise SampleError(
                f"{self.where} has {len(found)} images, not one of .{' .'.join(IMAGE_EXTENSIONS)}; {MEND_SAMPLE}"
            )
        return found[0]

    def load(self, num_classes: int | None) -> Sample:
        extension = self.extension
        most = MAX_TEXT_BYTES if extension == TEXT else MAX_MEMBER_BYTES
        label, data = self.label(num_classes), self.read(extension, most)
        return Sample(self.where, self.key, label, data, extension, self.copy)


class Header(tarfile.TarInfo):
    """A header as tarfile reads it, but with bounds, and faster for a plain file."""

    @classmethod
    def plain(cls, block: bytes) -> "Header | None":
        """Parse name and size of a plain file's header, like nearly all of a shard, in a fraction of tarfile's time.

        Returns None for anything else, or for damage.
        """
        if len(block) < tarfile.BLOCKSIZE or block[156:157] != tarfile.REGTYPE or block[345]:  # no name prefix
            return None
        size, checksum = block[124:136].rstrip(b" \0"), block[148:156].rstrip(b" \0")
        numbers = OCTAL.fullmatch(size) and OCTAL.fullmatch(checksum)
        if not numbers or int(checksum, 8) != sum(block) - sum(block[148:156]) + 8 * ord(" "):
            return None
        header = cls(block[:100].partition(b"\0")[0].decode(tarfile.ENCODING, "surrogateescape"))
        header.size = int(size, 8)
        return header

    def _proc_member(self, tar: "Tar") -> tarfile.TarInfo:
        """Bound headers of more than one block, at tarfile's extension point. Raises `tarfile.ReadError`."""
        if self.type == tarfile.GNUTYPE_SPARSE or self.size < 0:
            raise tarfile.ReadError(f"a member of kind {self.type!r} and {self.size} bytes, not a plain file")
        tar.extensions = tar.extensions + 1 if self.type in EXTENSIONS else 0
        if tar.extensions:
            if self.size > MAX_EXTENSION_BYTES or tar.extensions > MAX_EXTENSIONS:
                raise tarfile.ReadError(f"header {tar.extensions} in a row for one member, of {self.size} bytes")
            self._refuse_what_tarfile_expands(tar.fileobj)
        return super()._proc_member(tar)  # type: ignore[misc]

    def _refuse_what_tarfile_expands(self, file: Any) -> None:
        """Refuse pax sparse files, whose map is as long as the shard, and long numbers.

        The file position is unchanged.
        """
        text = file.read(self.size)
        file.seek(-len(text), os.SEEK_CUR)
        if b"GNU.sparse" in text or LONG_NUMBER.search(text):
            raise tarfile.ReadError("a pax header of a sparse file, or with a number of 32 digits")


class Tar(tarfile.TarFile):
    """A tar reader. `extensions` counts the headers for the next member since the last one."""

    tarinfo = Header
    extensions = 0

    def next(self) -> tarfile.TarInfo | None:
        """Return the next member: a plain one from one read of its header, any other as tarfile reads it."""
        if self.firstmember is not None or self.pax_headers:  # type: ignore[attr-defined]
            return super().next()  # opening has read it, or a global header affects all that follow
        header = Header.plain(os.pread(self.fileobj.fileno(), tarfile.BLOCKSIZE, self.offset))  # type: ignore[attr-defined]
        if header is None:
            return super().next()
        header.offset, header.offset_data, self.extensions = self.offset, self.offset + tarfile.BLOCKSIZE, 0
        self.offset = header.offset_data + -(-header.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        return header


def opened(shard: Shard, first: int = 0, last: int | None = None) -> OpenShard:
    """Open the shard as an unpacked file, of which samples first..last will be read. Raises `UserError`."""
    file = as_it_is(shard, first, last)
    try:
        return OpenShard(unpacked(shard, file))
    except BaseException:
        file.close()
        raise


def unpacked(shard: Shard, file: BinaryIO) -> BinaryIO:
    """Return the file, or its content as a temporary file if it is compressed by gzip. Raises `UserError`.

    Shards of a hundred times their size are refused: a small one could fill the disk.
    """
    if os.pread(file.fileno(), 2, 0) != GZIP:
        return file
    limit = max(UNPACKED, MAX_RATIO * os.fstat(file.fileno()).st_size)
    plain = tempfile.TemporaryFile()  # noqa: SIM115  (the caller's)
    try:
        with file, gzip.GzipFile(fileobj=file, mode="rb") as content:
            while chunk := content.read(2**20):
                plain.write(chunk)
                if plain.tell() > limit:
                    raise UserError(f"{shard}: unpacks to more than {limit / 1e6:.0f} MB; {MEND_SHARD}")
        plain.seek(0)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        plain.close()
        raise UserError(f"{shard}: truncated or damaged ({error}); {MEND_SHARD}") from None
    except OSError as error:
        plain.close()
        raise UserError(
            f"{shard}: cannot be unpacked into {tempfile.gettempdir()} ({error.strerror or error}); set TMPDIR to a "
            "larger disk"
        ) from None
    except BaseException:
        plain.close()
        raise
    return plain


def as_it_is(shard: Shard, first: int = 0, last: int | None = None) -> BinaryIO:
    """Open the shard as a file. Raises `UserError`, also for anything but a file: reading a pipe could block."""
    if isinstance(shard, Path) and shard.exists() and not shard.is_file():
        raise UserError(f"{shard} is not a file; {MEND_SHARD}")
    try:
        return shard.open("rb") if isinstance(shard, Path) else shard.open("rb", first, last)
    except OSError as error:
        raise UserError(f"{shard}: cannot be read ({error.strerror or error}); {MEND_SHARD}") from None


def walk(path: Shard, opened: OpenShard, begin: int = 0) -> Iterator[Entry]:
    """Iterate over the samples of an opened shard, from the one whose header is at byte `begin`.

    Raises `UserError` unless the rest is a complete, plain tar.
    """
    file = opened.file
    try:
        file.seek(begin)
        with Tar.open(fileobj=file, mode="r:") as tar:
            for key, group in groupby(_members(path, tar), key=lambda named: named[0]):
                yield Entry(path, key, _parts(path, key, group), opened)
            file.seek(tar.offset)
            rest = file.read(2**20)
    except (tarfile.TarError, ValueError, OverflowError, MemoryError) as error:  # headers may say anything
        raise UserError(f"{path}: truncated or not a tar ({error}); {MEND_SHARD}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); {MEND_SHARD}") from None
    if len(rest) < END_OF_ARCHIVE or any(rest):
        raise UserError(f"{path}: truncated or damaged at byte {tar.offset} (no end of archive); {MEND_SHARD}")


def _members(path: Shard, tar: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Iterate over (key, extension, member) of each file that belongs to a sample."""
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # tarfile keeps them all
        if member.isdir():
            continue
        if not member.isreg() or member.issparse() or member.size < 0:  # tarfile would walk back forever
            raise UserError(f"{path}: member {member.name} is not a plain file; {MEND_SHARD}")
        key, extension = split_name(member.name)
        if key:
            yield key, extension, member


def _parts(path: Shard, key: str, group: Iterator[tuple[str, str, tarfile.TarInfo]]) -> dict[str, tarfile.TarInfo]:
    parts: dict[str, tarfile.TarInfo] = {}
    for _, extension, member in group:
        if extension in parts:
            raise UserError(f"{path}: sample {key} has two .{extension} members; {MEND_SHARD}")
        if len(parts) == MAX_MEMBERS:
            raise UserError(f"{path}: sample {key} has more than {MAX_MEMBERS} members; {MEND_SHARD}")
        parts[extension] = member
    return parts


def split_name(member: str) -> tuple[str, str]:
    """Split 'a/b.c.JPG' into ('a/b', 'c.jpg') by webdataset's rule; ('', '') for a name without stem or extension."""
    folder, slash, base = member.rpartition("/")
    stem, _, extension = base.partition(".")
    return (folder + slash + stem, extension.lower()) if stem and extension else ("", "")


def _escapes(name: str) -> bool:
    return name.startswith("/") or "\\" in name or ".." in name.split("/")
