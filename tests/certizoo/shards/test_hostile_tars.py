"""Hostile shards give one line or the good samples, within seconds and within 256 MiB beyond the imports."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from certizoo import UserError, shards
from certizoo.shards import DataConfig
from tests.tools import hostile_shards as h

SECONDS = 10
LIMIT = """
import resource, sys
from certizoo import shards
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
data = shards.DataConfig("x", sys.argv[1], "x.tar", "x.tar", num_classes=10, img_size=8)
try:
    loader = shards.eval_loader(shards.find(data, "test"), data, batch_size=16)
    print(sum(len(keys) for keys, _, _ in loader), "read")
except shards.UserError as error:
    print("refused:", error)
"""


def read(folder: Path) -> str:
    """Return 'N read' or 'refused: ...' for the shard x.tar, from a process of bounded memory."""
    command = [sys.executable, "-c", LIMIT, str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = done.stdout.splitlines()
    return line


def outcome(folder: Path) -> str:
    """Return the same from this process, since most faults need no memory."""
    data = DataConfig("x", str(folder), "x.tar", "x.tar", num_classes=10, img_size=8)
    start = time.monotonic()
    try:
        loader = shards.eval_loader(shards.find(data, "test"), data, batch_size=16)
        said = f"{sum(len(keys) for keys, _, _ in loader)} read"
    except UserError as error:
        said = f"refused: {error}"
    assert time.monotonic() - start < SECONDS
    assert len(said.splitlines()) == 1
    assert all(letter.isprintable() for letter in said)
    return said


LONG = h.member(b"././@LongLink", b"n" * 200 + b"\0", b"L")
HEADERS: dict[str, tuple[list[bytes], str]] = {
    "3000 chained long names": ([LONG * 3000], "refused"),
    "300 chained long links": ([h.member(b"././@LongLink", b"n" * 200 + b"\0", b"K") * 300], "refused"),
    "3000 chained pax headers": ([h.pax(h.record(b"comment", b"x")) * 3000], "refused"),
    "3000 chained global headers": ([h.pax(h.record(b"comment", b"x"), b"g") * 3000], "refused"),
    "long name of 4 MB": ([h.member(b"././@LongLink", b"n" * 2**22, b"L"), h.GOOD], "refused"),
    "pax header of 4 MB": ([h.pax(h.record(b"path", b"n" * 2**22)), h.GOOD], "refused"),
    "pax header of digits alone": ([h.pax(b"1" * 4000) * 400], "refused"),
    "pax header of one large block of digits": ([h.pax(b"1" * 2**19)], "refused"),
    "pax line that claims 10^18 bytes": ([h.pax(b"1000000000000000000 path=x\n"), h.GOOD], ""),
    "pax line of length 0": ([h.pax(b"0 path=x\n"), h.GOOD], ""),
    "pax size of 2^60": ([h.pax(h.record(b"size", b"%d" % 2**60)), h.member(b"s1.cls", b"1")], "refused"),
    "pax size below 0": ([h.pax(h.record(b"size", b"-512")), h.member(b"s1.cls", b"1")], "refused"),
    "pax path upwards": ([h.pax(h.record(b"path", b"../../s1.cls")), h.member(b"a", b"1")], "refused"),
    "sparse": ([h.member(b"s1.cls", b"1", b"S")], "refused"),
    "sparse by pax": ([h.pax(h.record(b"GNU.sparse.major", b"1") + h.record(b"GNU.sparse.minor", b"0")),
                       h.member(b"s1.cls", b"9" * 600 + b"\n")], "refused"),
    "hard link": ([h.member(b"s1.cls", b"", b"1", link=b"/etc/passwd")], "refused"),
    "symbolic link": ([h.member(b"s1.cls", b"", b"2", link=b"/etc/passwd")], "refused"),
    "character device": ([h.member(b"s1.cls", b"", b"3")], "refused"),
    "block device": ([h.member(b"s1.cls", b"", b"4")], "refused"),
    "fifo": ([h.member(b"s1.cls", b"", b"6")], "refused"),
    "contiguous": ([h.member(b"s1.cls", b"1", b"7"), h.member(b"s1.png", h.png())], "2 read"),
    "unknown kind": ([h.member(b"s1.cls", b"1", b"Q")], "refused"),
    "unknown kind of negative size": ([h.member(b"s1.cls", b"", b"Q", size=h.base256(-512))], "refused"),
    "octal size beyond the file": ([h.member(b"s1.cls", b"1", size=b"77777777777")], "refused"),
    "size of 2^60": ([h.member(b"s1.cls", b"1", size=h.base256(2**60))], "refused"),
    "size of 2^80": ([h.member(b"s1.cls", b"1", size=h.base256(2**80))], "refused"),
    "size of 10 GB": ([h.member(b"s1.png", h.png(), size=h.base256(10**10))], "refused"),
    "negative size": ([h.member(b"s1.cls", b"1", size=h.base256(-1024))], "refused"),
    "negative size of a long name": ([h.member(b"././@LongLink", b"", b"L", size=h.base256(-512)), h.GOOD], "refused"),
    "negative size of a pax header": ([h.member(b"pax", b"", b"x", size=h.base256(-512)), h.GOOD], "refused"),
    "folder of negative size": ([h.member(b"a/", b"", b"5", size=h.base256(-512))], ""),
    "size that is no number": ([h.member(b"s1.cls", b"1", size=b"12x")], "refused"),
    "wrong checksum": ([h.header(b"s1.cls", 0, checksum=1)], "refused"),
    "cut header": ([h.header(b"s1.cls")[:300]], "refused"),
    "the same member twice": ([h.member(b"s1.cls", b"1") * 2 + h.member(b"s1.png", h.png())], "refused"),
    "a sample of 10,000 members": ([b"".join(h.member(b"s1.x%d" % n) for n in range(10_000))], "refused"),
    "upwards": ([h.member(b"../s1.cls", b"1") + h.member(b"../s1.png", h.png())], "refused"),
    "absolute": ([h.member(b"/s1.cls", b"1") + h.member(b"/s1.png", h.png())], "refused"),
    "backslashes": ([h.member(b"a\\..\\s1.cls", b"1") + h.member(b"a\\..\\s1.png", h.png())], ""),
    "escape sequence in a name": ([h.member(b"\x1b[2J.cls", b"x") + h.member(b"\x1b[2J.png", h.png())], "refused"),
    "names that are no UTF-8": ([h.member(b"\xff\xfe.cls", b"x") + h.member(b"\xff\xfe.png", h.png())], "refused"),
    "direction of writing in a name": ([h.member("\u202egnp.cls".encode(), b"x")], "refused"),
    "rest after the end": ([h.END, h.GOOD], "refused"),
}  # fmt: skip


@pytest.mark.hostile
@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_header_is_one_line_at_once(name: str, tmp_path: Path) -> None:
    parts, expected = HEADERS[name]
    path = h.written(tmp_path / "x.tar", *parts)
    said = outcome(tmp_path)
    assert said.startswith(expected)
    assert "x.tar" in said or not said.startswith("refused")
    assert path.is_file()


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (b"1e400", "refused"), (b"-1", "refused"), (b"+1", "refused"), (b"0x1", "refused"), (b"1_0", "refused"),
        ("\u0661".encode(), "refused"), ("\u00b2".encode(), "refused"), (b"9" * 5000, "refused"), (b"1\n", "2 read"),
        (b"1" + b" " * 31 + b"junk", "refused"), (b"NaN", "refused"), (b"\x1b[2J", "refused"), (b"1\0", "refused"),
    ],
)  # fmt: skip
def test_a_hostile_label_is_refused(label: bytes, expected: str, tmp_path: Path) -> None:
    h.written(tmp_path / "x.tar", h.member(b"s1.cls", label), h.member(b"s1.png", h.png()))
    assert outcome(tmp_path).startswith(expected)


def _sparse(path: Path, kind: bytes, size: int) -> None:
    """Make a member of `size` bytes that take no space on the disk."""
    start = h.GOOD + h.header(b"s1.cls", h.base256(size), kind)
    with path.open("wb") as file:
        file.write(start)
        file.seek(len(start) + size)
        file.write(h.member(b"s1.png", h.png()) + h.END)


@pytest.mark.hostile
@pytest.mark.slow
@pytest.mark.parametrize("kind", [b"0", b"L", b"x", b"g", b"S"])
def test_a_member_of_4_gigabytes_takes_no_memory(kind: bytes, tmp_path: Path) -> None:
    _sparse(tmp_path / "x.tar", kind, 2**32)
    assert read(tmp_path).startswith("refused: ")


@pytest.mark.slow
@pytest.mark.hostile
def test_many_empty_members_take_no_memory(tmp_path: Path) -> None:
    with (tmp_path / "x.tar").open("wb") as file:
        file.write(h.GOOD)
        block = h.header(b"nameless")
        for _ in range(300):
            file.write(block * 1000)
        file.write(h.END)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert read(tmp_path) == "1 read"
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 40
