"""Small stand-ins for data that a reader has: the archives of ImageNet with a few pictures."""

import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

WNIDS = ("n01440764", "n01443537", "n01484850")


def imagenet_archive(folder: Path) -> None:
    """Make ILSVRC2012_img_train.tar with one archive for each class."""
    with tarfile.open(folder / "ILSVRC2012_img_train.tar", "w") as outer:
        for wnid in WNIDS:
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w") as inner:
                for i in range(4):
                    _add(inner, f"{wnid}_{i}.JPEG", _picture(seed=i, side=600))
            _add(outer, f"{wnid}.tar", buffer.getvalue())


def imagenet_validation(folder: Path) -> None:
    """Make imagenet/val as torchvision leaves it."""
    for wnid in WNIDS:
        place = folder / "imagenet" / "val" / wnid
        place.mkdir(parents=True)
        (place / f"ILSVRC2012_val_{WNIDS.index(wnid):08d}.JPEG").write_bytes(_picture(seed=9, side=300))


STANDINS: Mapping[str, Callable[[Path], None]] = {
    "imagenet_archive": imagenet_archive,
    "imagenet_validation": imagenet_validation,
}


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def _picture(seed: int, side: int) -> bytes:
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(coarse).resize((side + 100, side)).save(buffer, "JPEG")
    return buffer.getvalue()
