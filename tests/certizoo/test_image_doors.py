"""Every door reads a picture alike: upright, on white, pixel by pixel, or it refuses the picture as the others do.

`DOORS` lists the files of the product that read pictures. A file that begins to read them fails here until it has a
door in the table.
"""

import ast
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from certify.photos import photo
from certizoo import UserError, shards
from certizoo.images import Pixels, flattened, pixels
from certizoo.shards import DataConfig
from certizoo.shards.__main__ import main
from certizoo.shards.writing import sources
from certizoo.shards.writing.inspect import GAP, NAME, inspect
from certizoo.shards.writing.write import encode
from tests.tools.folders import FILES, ROOT, imported, parsed
from tests.tools.odd_images import EVERY_MODE, SIDE, drawn, exif_of, odd_images, saved, transparent

Door = Callable[[str, bytes, Path], Pixels]


def config(root: Path) -> DataConfig:
    return DataConfig("toy", str(root), "toy-train-*.tar", "toy-test-*.tar", 2, SIDE)


def bytes_of(images_BCHW) -> Pixels:  # type: ignore[no-untyped-def]
    return (images_BCHW[0] * 255).round().byte().permute(1, 2, 0).numpy()


def sharded(name: str, data: bytes, root: Path) -> None:
    """Write the file into a shard as other programs do, without looking at it."""
    with tarfile.open(root / "toy-test-000000.tar", "w") as tar:
        for member, content in ((name, data), (name.partition(".")[0] + ".cls", b"1")):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            tar.addfile(info, BytesIO(content))


def evaluated(root: Path) -> Pixels:
    [(_, images, _)] = shards.eval_loader(shards.find(config(root), "test"), config(root), batch_size=1)
    return bytes_of(images)


def eval_loader(name: str, data: bytes, root: Path) -> Pixels:
    sharded(name, data, root)
    return evaluated(root)


def train_loader(name: str, data: bytes, root: Path) -> Pixels:
    sharded(name, data, root)
    (root / "toy-test-000000.tar").rename(root / "toy-train-000000.tar")
    found = shards.find(config(root), "train")
    [(images, _)] = shards.train_loader(found, config(root), batch_size=1, epoch=0, seed=0)
    return bytes_of(images)


def index(name: str, data: bytes, root: Path) -> Pixels:
    sharded(name, data, root)
    refused_by_command(["index", str(root), "--decode"])
    return evaluated(root)


def folder(name: str, data: bytes, root: Path) -> Pixels:
    source = root / "pictures" / "b"
    source.mkdir(parents=True)
    (source / name).write_bytes(data)
    shards.write(sources.Folder(source.parent), root, name="toy", split="test")
    return evaluated(root)


def folder_with_resize(name: str, data: bytes, root: Path) -> Pixels:
    (root / name).write_bytes(data)
    shards.write([(root / name, 0)], root, name="toy", split="test", resize=SIDE)
    return evaluated(root)


def contact_sheet(name: str, data: bytes, root: Path) -> Pixels:
    folder = root / "pictures" / "a"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(data)
    found = inspect(folder.parent, every=True)
    if any("the image" in warning for warning in found.warnings):
        raise UserError(found.warnings[-1])
    sheet, left = np.asarray(Image.open(BytesIO(found.sheet))), GAP + NAME
    return sheet[GAP : GAP + SIDE, left : left + SIDE]


def file_of_photo(name: str, data: bytes, root: Path) -> Pixels:
    (root / name).write_bytes(data)
    return bytes_of(photo.read(root / name, 3, SIDE).image_CHW[None])


def sent_photo(name: str, data: bytes, root: Path) -> Pixels:
    return bytes_of(photo.photo(data, name, 3, SIDE).image_CHW[None])


def refused_by_command(words: list[str]) -> None:
    try:
        main(words)
    except SystemExit as end:
        raise UserError("the command refuses it; see stderr") from end


# file of the product that reads pictures -> its doors
DOORS: dict[str, list[Door]] = {
    "certizoo/shards/format/tar.py": [eval_loader, train_loader, index],
    "certizoo/shards/writing/inspect.py": [contact_sheet],
    "certizoo/shards/writing/write.py": [folder, folder_with_resize],
    "certify/photos/photo.py": [file_of_photo, sent_photo],
}
READERS = {f"certizoo.images.{name}" for name in ("pixels", "picture", "flattened")}
EVERY_DOOR = [door for doors in DOORS.values() for door in doors]
ODD = dict(odd_images())


def seen(door: Door, name: str, data: bytes, root: Path) -> Pixels | None:
    """Return the pixels behind a door, or None if it refuses the picture in one line."""
    root.mkdir(parents=True)
    try:
        return door(name, data, root)
    except UserError:
        return None


def reference(data: bytes) -> Pixels | None:
    try:
        return pixels(data, 3)
    except UserError:
        return None


@pytest.mark.parametrize("door", EVERY_DOOR, ids=lambda door: door.__name__)
def test_200_odd_files_are_seen_alike_or_refused_alike_through_every_door(door: Door, tmp_path: Path) -> None:
    assert len(ODD) == 200
    for number, (name, data) in enumerate(ODD.items()):
        here, expected = seen(door, name, data, tmp_path / str(number)), reference(data)
        if here is None or expected is None:
            assert here is expected, name
        else:
            assert np.array_equal(here, expected), name


def test_a_file_that_reads_pictures_has_a_door_above() -> None:
    readers = {file.as_posix() for file in FILES if READERS & imported(ROOT / file)}
    assert readers == set(DOORS)


def test_only_one_file_opens_pictures() -> None:
    """Pillow draws elsewhere (reports, contact sheets), but decodes here."""
    for file in FILES:
        if file.as_posix() == "certizoo/images.py":
            continue
        calls = {ast.unparse(node.func) for node in ast.walk(parsed(ROOT / file)) if isinstance(node, ast.Call)}
        assert not {"Image.open", "PIL.Image.open", "decode_image", "read_image", "cv2.imread", "cv2.imdecode"} & calls
        assert not any(
            name.startswith(("torchvision.io", "PIL.ImageFile", "imageio")) for name in imported(ROOT / file)
        )


TURNED: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda stored: stored,
    2: np.fliplr,
    3: lambda stored: np.rot90(stored, 2),
    4: np.flipud,
    5: lambda stored: stored.transpose(1, 0, 2),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored, 2).transpose(1, 0, 2),
    8: np.rot90,
}
"""EXIF's table: what the first row and the first column of the stored pixels are of the picture."""


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_pictures_stand_upright(orientation: int, kind: str) -> None:
    stored = Image.fromarray(np.asarray(drawn("RGB"))[: SIDE - 3])  # not square
    options = {"lossless": True} if kind == "WEBP" else {}
    as_it_lies = pixels(saved(stored, kind, **options), 3)
    upright = pixels(saved(stored, kind, exif=exif_of(orientation), **options), 3)
    assert np.array_equal(upright, TURNED[orientation](as_it_lies))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_shows_white(mode: str) -> None:
    """Composited on white: a c + (1 - a) 255, rounded."""
    image = drawn(mode)
    bands = np.asarray(image).astype(float)
    alpha = bands[..., -1:] / 255
    expected = alpha * bands[..., :-1] + (1 - alpha) * 255
    shown = pixels(saved(image, "PNG"), 3)
    assert np.abs(shown - expected).max() <= 1
    assert (shown[alpha[..., 0] == 0] == 255).all()


def test_a_palette_entry_declared_transparent_is_white() -> None:
    image = drawn("P")
    entry = int(np.asarray(image)[0, 0])
    hidden = np.asarray(image) == entry
    shown = pixels(transparent("P", entry), 3)
    assert (shown[hidden] == 255).all()
    assert np.array_equal(shown[~hidden], np.asarray(image.convert("RGB"))[~hidden])


@pytest.mark.parametrize("mode", EVERY_MODE)
@pytest.mark.parametrize("orientation", [1, 6])
def test_a_picture_in_memory_is_written_as_it_is_seen(mode: str, orientation: int) -> None:
    image = drawn(mode)
    image.getexif()[0x0112] = orientation
    _, data = encode(image)
    assert np.array_equal(pixels(data, 3), np.asarray(flattened(image).convert("RGB")))
    assert "exif" not in Image.open(BytesIO(data)).info


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_a_picture_in_memory_of_other_depth_is_refused(mode: str) -> None:
    with pytest.raises(UserError, match=f"mode {mode}, not gray or colour of 8 bits"):
        encode(drawn("I;16").convert(mode) if mode != "I;16" else drawn(mode))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_resizing_keeps_the_picture_upright_once(kind: str, tmp_path: Path) -> None:
    """A tag that survived the resize would turn the picture again; a tag that was lost would leave it on its side."""
    stored = drawn("RGB").resize((64, 32), Image.Resampling.NEAREST)
    path = tmp_path / f"a.{kind.lower()}"
    path.write_bytes(saved(stored, kind, exif=exif_of(6)))
    small = pixels(encode(path, resize=16)[1], 3)
    shrunk = Image.fromarray(np.rot90(np.asarray(stored), -1)).resize((16, 32), Image.Resampling.BICUBIC)
    assert small.shape == (32, 16, 3)
    assert np.abs(small.astype(float) - np.asarray(shrunk)).mean() < 12  # JPEG loses colour
