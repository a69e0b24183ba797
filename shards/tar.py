"""One walk over a shard, for checking and for reading alike.

webdataset's own tar stage lets pass a shard cut between members, a sample without its label, a member of any
size and a name that escapes. This walk refuses them, and it reads no byte of a sample that nobody asked for.
"""

import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from certizoo import UserError

MAX_MEMBER_BYTES = 64 * 2**20
MAX_LABEL_BYTES = 32
MAX_MEMBERS = 64  # of one sample
# Of a header that says more of the next member: a long name, or pax. Paths end at 4096 bytes on every system.
MAX_EXTENSION_BYTES = 8192
MAX_EXTENSIONS = 4  # one behind the other; tarfile reads each inside the one before
EXTENSIONS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
LONG_NUMBER = re.compile(rb"[0-9]{32}")  # tarfile's patterns take the square of its length
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
END_OF_ARCHIVE = 1024  # bytes: two blocks of zeros close every tar
OCTAL = re.compile(rb"[0-7]+")
MEND_SHARD = "copy or write the shard again"
MEND_SAMPLE = "mend it and write the shard again (training can skip it: data.on_corrupt=skip)"


class Shard(Protocol):
    """A tar that can be opened as a local file: a `Path`, or a shard that is fetched first. `str` is for people."""

    @property
    def name(self) -> str: ...

    def open(self, mode: Literal["rb"]) -> BinaryIO: ...


class SampleError(UserError):
    """A fault of one sample. Training may skip it (`data.on_corrupt=skip`), evaluation never does."""


@dataclass(frozen=True)
class Sample:
    """An encoded image and its label. `where` is 'SHARD: sample KEY', the head of every error about it."""

    where: str
    key: str
    label: int
    image: bytes


@dataclass(frozen=True)
class Entry:
    """A sample still in its shard: members by extension. Readable until the walk that gave it moves on."""

    shard: Shard
    key: str
    parts: dict[str, tarfile.TarInfo]
    fd: int

    @property
    def where(self) -> str:
        return f"{self.shard}: sample {self.key}"

    def read(self, extension: str, most: int = MAX_MEMBER_BYTES) -> bytes:
        """The bytes of one member. Raises `SampleError` if they are more than `most`, `UserError` if the shard ends
        early."""
        member = self.parts[extension]
        if member.size > most:
            raise SampleError(f"{self.where}: .{extension} holds {member.size} bytes, more than {most}; {MEND_SAMPLE}")
        data = os.pread(self.fd, member.size, member.offset_data)
        if len(data) < member.size:
            raise UserError(f"{self.shard}: truncated in {member.name}; {MEND_SHARD}")
        return data

    def label(self, num_classes: int | None) -> int:
        """The integer of `.cls`, below `num_classes` where that is known. Raises `SampleError`."""
        if _escapes(self.key):
            raise SampleError(f"{self.where}: the member name leaves the folder; {MEND_SAMPLE}")
        if "cls" not in self.parts:
            raise SampleError(f"{self.where} has no .cls (label); {MEND_SAMPLE}")
        text = self.read("cls", MAX_LABEL_BYTES).decode("ascii", "replace").strip()
        if not text.isdigit() or (num_classes is not None and int(text) >= num_classes):
            allowed = "a whole number" if num_classes is None else f"one of the labels 0..{num_classes - 1}"
            raise SampleError(f"{self.where}: .cls holds {text!r}, not {allowed}; mend the label (or data.num_classes)")
        return int(text)

    @property
    def image_extension(self) -> str:
        """Raises `SampleError` unless the sample has exactly one image."""
        found = [extension for extension in self.parts if extension in IMAGE_EXTENSIONS]
        if len(found) != 1:
            raise SampleError(
                f"{self.where} has {len(found)} images, not one of .{' .'.join(IMAGE_EXTENSIONS)}; {MEND_SAMPLE}"
            )
        return found[0]

    def load(self, num_classes: int) -> Sample:
        return Sample(self.where, self.key, self.label(num_classes), self.read(self.image_extension))


class Header(tarfile.TarInfo):
    """As tarfile reads it, but nothing without bound; and a plain file's in less time."""

    @classmethod
    def plain(cls, block: bytes) -> "Header | None":
        """A plain file's, as nearly all of a shard are, in a fraction of tarfile's time; of it the name and the size.
        None: it is something else, or damaged."""
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
        """tarfile's place for subclasses that read headers of more than one block. Raises `tarfile.ReadError` for those
        that it would read without bound."""
        if self.type == tarfile.GNUTYPE_SPARSE or self.size < 0:
            raise tarfile.ReadError(f"a member of kind {self.type!r} and {self.size} bytes, no plain file")
        tar.extensions = tar.extensions + 1 if self.type in EXTENSIONS else 0
        if tar.extensions:
            if self.size > MAX_EXTENSION_BYTES or tar.extensions > MAX_EXTENSIONS:
                raise tarfile.ReadError(f"header {tar.extensions} in a row for one member, of {self.size} bytes")
            self._refuse_what_tarfile_expands(tar.fileobj)
        return super()._proc_member(tar)  # type: ignore[misc]

    def _refuse_what_tarfile_expands(self, file: Any) -> None:
        """Sparse files by pax, whose map is as long as the shard, and long numbers. The file stays where it is."""
        text = file.read(self.size)
        file.seek(-len(text), os.SEEK_CUR)
        if b"GNU.sparse" in text or LONG_NUMBER.search(text):
            raise tarfile.ReadError("a pax header of a sparse file, or with a number of 32 digits")


class Tar(tarfile.TarFile):
    """`extensions`: how many headers that belong to the next member came since the last one."""

    tarinfo = Header
    extensions = 0

    def next(self) -> tarfile.TarInfo | None:
        """The next member: a plain one by one read of its header, any other as tarfile reads it."""
        if self.firstmember is not None or self.pax_headers:  # type: ignore[attr-defined]
            return super().next()  # opening has read it, or something was said of all that follow
        header = Header.plain(os.pread(self.fileobj.fileno(), tarfile.BLOCKSIZE, self.offset))  # type: ignore[attr-defined]
        if header is None:
            return super().next()
        header.offset, header.offset_data, self.extensions = self.offset, self.offset + tarfile.BLOCKSIZE, 0
        self.offset = header.offset_data + -(-header.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        return header


def opened(shard: Shard) -> BinaryIO:
    """The shard as a file. Raises `UserError`, also for what is there and no file: a pipe would keep us waiting."""
    if isinstance(shard, Path) and shard.exists() and not shard.is_file():
        raise UserError(f"{shard} is not a file; {MEND_SHARD}")
    try:
        return shard.open("rb")
    except OSError as error:
        raise UserError(f"{shard}: cannot be read ({error.strerror or error}); {MEND_SHARD}") from None


def walk(path: Shard, file: BinaryIO) -> Iterator[Entry]:
    """The samples of a shard, opened as `file`, in file order. Raises `UserError` unless it is a whole, plain tar."""
    try:
        with Tar.open(fileobj=file, mode="r:") as tar:
            for key, group in groupby(_members(path, tar), key=lambda named: named[0]):
                yield Entry(path, key, _parts(path, key, group), file.fileno())
            file.seek(tar.offset)
            rest = file.read(2**20)
    except (tarfile.TarError, ValueError, OverflowError, MemoryError) as error:  # headers may say anything
        raise UserError(f"{path}: truncated or not a tar ({error}); {MEND_SHARD}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); {MEND_SHARD}") from None
    if len(rest) < END_OF_ARCHIVE or any(rest):
        raise UserError(f"{path}: truncated or damaged at byte {tar.offset} (no end of archive); {MEND_SHARD}")


def _members(path: Shard, tar: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """(key, extension, member) of each file that belongs to a sample."""
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # tarfile keeps them all
        if member.isdir():
            continue
        if not member.isreg() or member.issparse() or member.size < 0:  # tarfile would walk back for ever
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
    """'a/b.c.JPG' -> ('a/b', 'c.jpg'), webdataset's rule; ('', '') for a name without stem or extension."""
    folder, slash, base = member.rpartition("/")
    stem, _, extension = base.partition(".")
    return (folder + slash + stem, extension.lower()) if stem and extension else ("", "")


def _escapes(name: str) -> bool:
    return name.startswith("/") or "\\" in name or ".." in name.split("/")
