"""Our scan of a tar finds the members that tarfile finds, in every tar format."""

import io
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest

from certizoo import UserError
from certizoo.shards.format.tar import opened, walk

NAMES = ("a", "ü-ñ", "folder/b", "n" * 80, "p" * 60 + "/" + "n" * 60, "l" * 200)
SIZES = (0, 1, 511, 512, 513, 5000)
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
PAX = {"none": None, "of all that follow": {"comment": "x" * 40}}


@pytest.mark.parametrize("pax", PAX)
@pytest.mark.parametrize("form", FORMATS)
def test_the_walk_finds_what_tarfile_finds(form: str, pax: str, tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=FORMATS[form], pax_headers=PAX[pax]) as tar:
        for name in NAMES[:-1] if form == "ustar" else NAMES:  # which has no room for the last
            for size in SIZES:
                member = tarfile.TarInfo(f"{name}-{size}.jpg")
                member.size = size
                tar.addfile(member, io.BytesIO(bytes([size % 251]) * size))
    with tarfile.open(path) as tar:
        expected = [(member.name, member.size, member.offset_data) for member in tar]
    found = [
        (f"{entry.key}.{ext}", part.size, part.offset_data, entry.read(ext))
        for entry in walk(path, opened(path))
        for ext, part in entry.parts.items()
    ]
    assert [one[:3] for one in found] == expected
    assert len(expected) >= len(SIZES) * 5
    assert all(data == bytes([size % 251]) * size for _, size, _, data in found)


@pytest.mark.parametrize("bit", range(0, 512 * 8, 97))
def test_a_wrong_bit_of_a_header_means_to_the_walk_what_it_means_to_tarfile(bit: int, tmp_path: Path) -> None:
    """A shard that tarfile reads differently is refused."""
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name in "abc":
            member = tarfile.TarInfo(f"{name}.jpg")
            member.size = 10
            tar.addfile(member, io.BytesIO(b"0123456789"))
    data = bytearray(path.read_bytes())
    data[1024 + bit // 8] ^= 1 << bit % 8  # in the header of b
    path.write_bytes(data)
    with tarfile.open(path) as tar:
        expected = [member.name for member in tar]
    found: list[str] = []
    with suppress(UserError):
        found += [f"{entry.key}.{ext}" for entry in walk(path, opened(path)) for ext in entry.parts]
    assert found in (expected, [])
