"""Write shards: shuffled by seed, reproducible byte for byte, and never partial under the final name."""

import io
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from certizoo import UserError
from certizoo.files import whole_file
from certizoo.images import MAX_PIXELS, ImageError, flattened, picture
from certizoo.progress import Progress, silent
from certizoo.shards.format import manifest
from certizoo.shards.format.config import require_name
from certizoo.shards.format.manifest import ShardInfo
from certizoo.shards.format.tar import TEXT
from certizoo.text import shown

EXTENSION_OF = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}  # MPO: a JPEG with a second view
MAX_SOURCE_PIXELS = 170_000_000  # with `resize`; Pillow itself stops at 179 million
MEND_FILE = "repair or remove the file"
JPEG_QUALITY = 95


def write(
    source: Sequence[tuple[Any, int]],
    root: Path,
    *,
    name: str,
    split: str,
    seed: int = 0,
    per_shard: int = 1000,
    resize: int | None = None,
    class_names: list[str] | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Path:
    """Write `{name}-{split}-{000000..}.tar` into `root`, list them in `{name}.json`, return its path.

    Samples are shuffled by `seed`, so that each shard is a fair sample of the classes. Image files are copied byte by
    byte after a test decoding; images in memory become PNG. `resize` shrinks images whose short side is longer.

    Raises:
        UserError: the shards exist (unless `overwrite`), an image is corrupt or the disk is full.
    """
    require_name(name, "--name")
    require_name(split, "--split")
    pattern = f"{name}-{split}-*.tar"
    _make(root)
    old = {path for path in root.iterdir() if _belongs(path.name, name, split)}
    if old and not overwrite:
        raise UserError(f"{root / pattern} exist; remove them, choose another --name, or add --overwrite")
    others, names = _listed(root, name, split, class_names)
    order = random.Random(seed).sample(range(len(source)), len(source))
    if not order:
        raise UserError(f"nothing to write as {root / pattern}: the source is empty; give another source")
    path_of_manifest = root / f"{name}.json"
    manifest.save(path_of_manifest, others, names)  # until the end, new shards are unlisted and thus refused
    infos = []
    for number, first in enumerate(range(0, len(order), per_shard)):
        path = root / f"{name}-{split}-{number:06d}.tar"
        members = (
            _sample(source[index], f"{name}-{split}-{place:08d}", resize)
            for place, index in zip(range(first, len(order)), order[first : first + per_shard], strict=False)
        )
        infos.append(_write_shard(path, members))
        old.discard(path)
        progress(min(first + per_shard, len(order)), len(order))
    for path in old:
        path.unlink()
    manifest.save(path_of_manifest, [*others, *infos], names)
    return path_of_manifest


def _belongs(file: str, name: str, split: str) -> bool:
    """Return True for a shard of this set and split; `toy-train-2-train-000000.tar` is one of the set toy-train-2."""
    return re.fullmatch(rf"{re.escape(name)}-{re.escape(split)}-[0-9]+\.tar", file) is not None


def _make(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{root} cannot be made ({error.strerror}); choose another root") from None


def _listed(
    root: Path, name: str, split: str, class_names: list[str] | None
) -> tuple[list[ShardInfo], list[str] | None]:
    """Return the shards of other splits in `{name}.json`. Raises `UserError` if those have other classes."""
    path = root / f"{name}.json"
    if not path.is_file() or (listing := manifest.read(root, name)) is None:
        return [], class_names
    others = [info for file, info in listing.files.items() if not _belongs(file, name, split)]
    if others and class_names and listing.class_names and class_names != listing.class_names:
        raise UserError(
            f"the classes of split {split} are not those in {path}, so labels would differ; "
            "give the same class folders to every split (they may be empty)"
        )
    return others, class_names or listing.class_names


def _write_shard(path: Path, members: Iterable[dict[str, Any]]) -> ShardInfo:
    """Write under another name, then rename: a file with the final name is complete."""
    import webdataset as wds  # of an extra

    labels: Counter[int] = Counter()
    try:
        with (
            whole_file(path) as part,
            part.open("wb") as file,
            wds.TarWriter(file, encoder=False, mtime=0, user="", group="", mode=0o644) as tar,
        ):
            for member in members:
                labels[int(member["cls"])] += 1
                tar.write(member)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}); free space or choose another root"
        ) from None
    size = path.stat().st_size
    whole, blocks = manifest.sha256_of(path), manifest.blocks_of(path)
    return ShardInfo(path.name, labels.total(), size, whole, dict(labels), blocks)


def _sample(item: tuple[Any, int], key: str, resize: int | None) -> dict[str, Any]:
    extension, data = encode(item[0], resize)
    return {"__key__": key, extension: data, "cls": str(_label(item[1], key)).encode()}


def _label(given: Any, key: str) -> int:
    try:
        label = index(given)
    except TypeError:
        raise UserError(f"sample {key} has the label {shown(given)}; give the number of its class, 0, 1, ...") from None
    if label < 0:
        raise UserError(f"sample {key} has the label {label}; classes count from 0")
    return label


def encode(image: Any, resize: int | None = None) -> tuple[str, bytes]:
    """Return (extension, bytes) of a path (unchanged), a PIL image or uint8 array (as PNG), or a sentence's bytes."""
    if isinstance(image, bytes):
        return TEXT, image
    if isinstance(image, str | Path):
        return _of_file(Path(image), resize)
    seen = flattened(image if isinstance(image, Image.Image) else _from_array(np.asarray(image)))
    return _encoded(_shrunk(seen, resize) if resize else seen, "PNG")


def _of_file(path: Path, resize: int | None) -> tuple[str, bytes]:
    data = _bytes_of(path)
    try:
        seen = picture(data, **({"max_pixels": MAX_SOURCE_PIXELS} if resize else {}))
    except ImageError as error:
        raise UserError(f"{path}: {error}; {MEND_FILE}") from None
    form = str(seen.format)
    small = _shrunk(seen, resize) if resize else seen
    if small.width * small.height > MAX_PIXELS:
        raise UserError(f"{path}: still {small.width} x {small.height} pixels after --resize; {MEND_FILE}")
    return (EXTENSION_OF[form], data) if small is seen else _encoded(small, form)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {MEND_FILE}") from None


def _from_array(array: np.ndarray) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise UserError(f"an image array is {array.dtype} {array.shape}; give uint8 of shape HW or HWC")
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def _shrunk(image: Image.Image, short: int) -> Image.Image:
    if min(image.size) <= short:
        return image
    return F.resize(image, [short], interpolation=v2.InterpolationMode.BICUBIC, antialias=True)


def _encoded(image: Image.Image, form: str) -> tuple[str, bytes]:
    buffer = io.BytesIO()
    form = "JPEG" if form == "MPO" else form
    bare = Image.fromarray(np.asarray(image))  # without metadata, whose orientation is already applied
    bare.save(buffer, form, **({} if form == "PNG" else {"quality": JPEG_QUALITY}))
    return EXTENSION_OF[form], buffer.getvalue()
