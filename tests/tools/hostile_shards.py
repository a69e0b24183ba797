"""Hostile shards: hand-written headers, members that tarfile would not write, images that expand."""

import io
import struct
import tarfile
import zlib
from pathlib import Path

from PIL import Image


def png(size: tuple[int, int] = (8, 8)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, "PNG")
    return buffer.getvalue()


def header(
    name: bytes, size: bytes | int = 0, kind: bytes = b"0", link: bytes = b"", checksum: int | None = None
) -> bytes:
    """Return one block of a tar.

    `size` is written as given, or as a number in octal; the checksum is right unless it is given.
    """
    written = size if isinstance(size, bytes) else b"%011o" % size
    block = bytearray(512)
    block[:100] = name[:100].ljust(100, b"\0")
    block[100:108] = block[108:116] = b"0000000\0"
    block[108:116] = block[116:124] = b"0000000\0"
    block[124:136] = written.ljust(12, b"\0")
    block[136:148] = b"00000000000\0"
    block[148:156] = b" " * 8
    block[156:157] = kind
    block[157:257] = link.ljust(100, b"\0")
    block[257:265] = b"ustar\x0000"
    block[148:156] = b"%06o\0 " % (sum(block) if checksum is None else checksum)
    return bytes(block)


def member(
    name: bytes, data: bytes = b"", kind: bytes = b"0", size: bytes | int | None = None, link: bytes = b""
) -> bytes:
    return header(name, len(data) if size is None else size, kind, link) + data + bytes(-len(data) % 512)


def base256(number: int) -> bytes:
    """Encode a size as GNU tar does where octal digits do not suffice or the size is negative."""
    return (b"\x80" if number >= 0 else b"\xff") + (number % 256**11).to_bytes(11, "big")


def pax(said: bytes, kind: bytes = b"x") -> bytes:
    return member(b"pax", said, kind)


def record(key: bytes, value: bytes) -> bytes:
    """Return a line of a pax header, with its own length first."""
    length = len(key) + len(value) + 3
    while length != len(b"%d %s=%s\n" % (length, key, value)):
        length = len(b"%d %s=%s\n" % (length, key, value))
    return b"%d %s=%s\n" % (length, key, value)


GOOD = member(b"s0.cls", b"1") + member(b"s0.png", png())
END = bytes(1024)


def written(path: Path, *parts: bytes) -> Path:
    """Return a tar of these parts between a good sample and the end of the archive."""
    path.write_bytes(b"".join((GOOD, *parts, END)))
    return path


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, *chunks: bytes) -> bytes:
    """Return a PNG that claims this size, with these chunks before pixel data that end at once."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def swollen(length: int) -> bytes:
    """Return `length` zeros, compressed to a thousandth."""
    return zlib.compress(bytes(length), 9)


def jpeg_of_scans(scans: int, size: tuple[int, int]) -> bytes:
    """Return a progressive JPEG whose last scan is repeated; each scan visits all pixels again."""
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, "JPEG", progressive=True)
    whole = buffer.getvalue()
    last = whole.rindex(b"\xff\xda")
    return whole[:last] + whole[last:-2] * scans + whole[-2:]


def tar_of(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
