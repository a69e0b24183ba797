"""Hostile images give pixels within seconds and bounded memory, or one line."""

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from certizoo.images import ImageError, pixels
from tests.tools import hostile_shards as h
from tests.tools.cases import mostly_slow

MEMORY = """
import resource, sys
from pathlib import Path
from certizoo.images import ImageError, pixels
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, used + 2**27))
try:
    print("read", pixels(Path(sys.argv[1]).read_bytes(), 3).shape)
except ImageError as error:
    print("refused:", error)
"""


def animated(kind: str) -> bytes:
    frames = [Image.new("RGB", (1000, 1000), (n, 0, 0)) for n in range(60)]
    buffer = io.BytesIO()
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
    return buffer.getvalue()


def of_profile(data: bytes) -> bytes:
    return h.png_of(8, 8, h.chunk(b"iCCP", b"x\0\0" + data))


SWOLLEN = 2**28
BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "PNG of 65535 x 65535": (lambda: h.png_of(65535, 65535), "refused"),
    "PNG of 2^31 - 1 by 1": (lambda: h.png_of(2**31 - 1, 1), "refused"),
    "PNG of no height": (lambda: h.png_of(8, 0), "refused"),
    "PNG of more rows than it holds": (lambda: h.png_of(4000, 4000), "refused"),
    "PNG whose pixels swell": (lambda: h.png_of(8, 8, h.chunk(b"IDAT", h.swollen(SWOLLEN))), ""),
    "text that swells": (lambda: h.png_of(8, 8, h.chunk(b"zTXt", b"a\0\0" + h.swollen(SWOLLEN))), "refused"),
    "international text that swells": (
        lambda: h.png_of(8, 8, h.chunk(b"iTXt", b"a\0\1\0\0\0" + h.swollen(SWOLLEN))),
        "refused",
    ),
    "much text": (lambda: h.png_of(8, 8, *[h.chunk(b"zTXt", b"a\0\0" + h.swollen(2**20))] * 80), "refused"),
    "colour profile that swells": (lambda: of_profile(h.swollen(SWOLLEN)), ""),
    "a chunk that claims 2 GB": (lambda: h.png_of(8, 8, b"\x7f\xff\xff\xffzTXt"), "refused"),
    "300,000 empty chunks": (lambda: h.png_of(8, 8, h.chunk(b"abCd", b"") * 300_000), ""),
    "JPEG of 65500 x 65500": (lambda: jpeg_of_size(65500, 65500), "refused"),
    "JPEG of 20,000 scans": (lambda: h.jpeg_of_scans(20_000, (4000, 4000)), "refused"),
    "animated WebP": (lambda: animated("WEBP"), ""),
    "animated PNG": (lambda: animated("PNG"), ""),
    "animated GIF": (lambda: animated("GIF"), "refused"),
    "TIFF": (lambda: saved("TIFF"), "refused"),
    "PostScript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run\n", "refused"),
    "SVG": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>', "refused"),
    "no bytes": (lambda: b"", "refused"),
}


def saved(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, kind)
    return buffer.getvalue()


def jpeg_of_size(width: int, height: int) -> bytes:
    data = bytearray(saved("JPEG"))
    start = data.index(b"\xff\xc0") + 5
    data[start : start + 4] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(data)


def outcome(data: bytes) -> str:
    try:
        return f"read {pixels(data, 3).shape}"
    except ImageError as error:
        return f"refused: {error}"


@pytest.mark.hostile
@pytest.mark.parametrize("name", mostly_slow(BOMBS, *list(BOMBS)[::4]))
def test_an_image_bomb_takes_seconds_at_most(name: str, tmp_path: Path) -> None:
    make, expected = BOMBS[name]
    data = make()
    start = time.monotonic()
    assert outcome(data).startswith(expected)
    assert time.monotonic() - start < 5


@pytest.mark.hostile
@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ("text that swells", "PNG whose pixels swell", "colour profile that swells", "animated WebP"),
        "PNG whose pixels swell",
    ),
)
def test_an_image_bomb_takes_no_memory(name: str, tmp_path: Path) -> None:
    make, expected = BOMBS[name]
    (tmp_path / "image").write_bytes(make())
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "image")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(expected)


def test_a_progressive_photograph_is_read() -> None:
    assert pixels(h.jpeg_of_scans(1, (64, 64)), 3).shape == (64, 64, 3)
