"""Look at a folder of images before it is written as shards: classes, counts, samples as a contact sheet, warnings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from certizoo.errors import UserError
from certizoo.files import disk_errors, whole_file
from certizoo.images import ImageError, array_of, picture
from certizoo.shards.writing.sources import Folder
from certizoo.text import plain

EACH = 6  # sample pictures of a class
ROWS = 40  # classes on the contact sheet
TILE, GAP, NAME = 96, 8, 220  # pixels: of a sample, between samples, and of the class's name
INK, PAPER = "#1b1f24", "#d8dee4"  # gray paper: white pictures stand out
UNEVEN = 10  # largest class / smallest class from which on a warning is due
FEW = 10  # images of a class below which a warning is due


@dataclass(frozen=True)
class Inspection:
    """The content of a folder: `counts` images of each of the `classes`, sample pictures as a PNG, and warnings."""

    classes: Sequence[str]
    counts: Sequence[int]
    sheet: bytes
    warnings: Sequence[str]


def inspect(root: Path, *, every: bool = False) -> Inspection:
    """Return what `shards folder` would write of the folder; `every` picture is decoded, or the samples alone.

    Raises `UserError` as `Folder` does.
    """
    source = Folder(root)
    paths: dict[int, list[Path]] = {label: [] for label in range(len(source.classes))}
    for path, label in source.items:
        paths[label].append(path)
    counts = [len(found) for found in paths.values()]
    warnings = [f"{root}: left out {source.left_out}"] if source.others else []
    warnings += _of_classes(source.classes, counts)
    if len(counts) > ROWS:
        warnings.append(f"the contact sheet shows the first {ROWS} of {len(counts)} classes")
    rows = []
    for label, name in enumerate(source.classes):
        samples = _samples(paths[label]) if label < ROWS else []
        tiles = [tile for path in samples if (tile := _seen(path, warnings))]
        if label < ROWS:
            rows.append((f"{label}  {plain(name)}", tiles))
        if every:
            for path in sorted({*paths[label]} - {*samples}):
                _seen(path, warnings)
    return Inspection(source.classes, counts, _sheet(rows), warnings)


def save(inspection: Inspection, path: Path) -> None:
    """Write the contact sheet."""
    with disk_errors("choose another file: --sheet FILE.png"), whole_file(path) as part:
        part.write_bytes(inspection.sheet)


def _of_classes(names: Sequence[str], counts: Sequence[int]) -> Iterator[str]:
    """Yield a warning for each likely mistake in the classes."""
    if len(names) == 1:
        yield f"there is one class, {names[0]}; give the folder above it if its subfolders are the classes"
    for name, count in zip(names, counts, strict=True):
        if count < FEW:
            yield f"class {name} has {count} images"
    if min(counts) and max(counts) >= UNEVEN * min(counts):
        yield f"classes are uneven: {max(counts)} images of the largest, {min(counts)} of the smallest"
    counted = sorted(names, key=int) if all(name.isdecimal() for name in names) else names
    if wrong := [label for label, (name, number) in enumerate(zip(names, counted, strict=True)) if name != number]:
        yield f"labels follow the alphabet: folder {names[wrong[0]]} is label {wrong[0]}; write it with zeros, as 02"


def _samples(paths: Sequence[Path]) -> list[Path]:
    """Return EACH of the paths, evenly spaced."""
    return [paths[place * len(paths) // EACH] for place in range(EACH)] if len(paths) > EACH else list(paths)


def _seen(path: Path, warnings: list[str]) -> Image.Image | None:
    """Return a picture as the loader sees it, shrunk; add a warning and return None if it cannot be read."""
    try:
        with disk_errors("repair or remove the file"):
            tile = Image.fromarray(array_of(picture(path.read_bytes()), 3))
    except UserError as error:
        warnings.append(f"{path}: {error}" if isinstance(error, ImageError) else str(error))
        return None
    tile.thumbnail((TILE, TILE))
    return tile


def _sheet(rows: Sequence[tuple[str, Sequence[Image.Image]]]) -> bytes:
    """Draw one row a class: its label, its name and its samples."""
    step = TILE + GAP
    sheet = Image.new("RGB", (GAP + NAME + EACH * step, GAP + len(rows) * step), PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    for row, (title, tiles) in enumerate(rows):
        draw.text((GAP, GAP + row * step + TILE // 2 - 8), title[:26], INK, font)
        for column, tile in enumerate(tiles):
            sheet.paste(tile, (GAP + NAME + column * step, GAP + row * step))
    buffer = BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()
