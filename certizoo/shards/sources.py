"""Sources of shards: anything indexable that gives (image, label), and has a length.

An image is a path, a PIL image or a uint8 array (HW, HWC). Torchvision data sets are sources as they are.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from certizoo import UserError
from certizoo.shards.tar import IMAGE_EXTENSIONS

log = logging.getLogger(__name__)
TORCHVISION_SETS = ("CIFAR10", "CIFAR100", "MNIST", "FashionMNIST")


class Folder(Sequence[tuple[Path, int]]):
    """A folder with a subfolder of images per class; labels number the subfolders in alphabetical order.

    Args:
        root: the folder.
        only: a text file that lists one image per line, such as a benchmark's official list; the last part of a path
            counts. The classes stay those of the folder.

    Raises:
        UserError: there are no images, or not exactly one of each name in `only`.
    """

    def __init__(self, root: Path, only: Path | None = None) -> None:
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; give the one that holds a subfolder of images per class")
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        self.items: list[tuple[Path, int]] = []
        others = 0
        for label, name in enumerate(self.classes):
            files = sorted(path for path in (root / name).rglob("*") if path.is_file())
            images = [path for path in files if path.suffix.lower().lstrip(".") in IMAGE_EXTENSIONS]
            others += len(files) - len(images)
            self.items += [(path, label) for path in images]
        if not self.items:
            raise UserError(f"{root} holds no CLASS/IMAGE of {', '.join(IMAGE_EXTENSIONS)}; give another folder")
        if others:
            log.warning("%s: left out %d files that are not %s", root, others, ", ".join(IMAGE_EXTENSIONS))
        if only is not None:
            self.items = _listed(self.items, only)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # the overloads of Sequence add nothing here
        return self.items[index]


def _listed(items: list[tuple[Path, int]], only: Path) -> list[tuple[Path, int]]:
    """Return the items that the file lists."""
    try:
        names = {Path(line.strip()).name for line in only.read_text().splitlines() if line.strip()}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--only {only} cannot be read ({error}); give a text file with one image per line") from None
    listed = [item for item in items if item[0].name in names]
    found = Counter(path.name for path, _ in listed)
    wrong = sorted(name for name in names if found[name] != 1)
    if wrong or not names:
        what = f"{wrong[0]} is there {found[wrong[0]]} times" if wrong else "it names no image"
        raise UserError(f"--only {only}: {what}; list the folder's files, one per line")
    return listed


def digits(seed: int = 0, test_fraction: float = 0.2) -> dict[str, list[tuple[NDArray[np.uint8], int]]]:
    """Return the 1797 handwritten digits of scikit-learn (8 x 8, gray), split 1437 / 360 and balanced by class."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images_NHW = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # the set counts ink from 0 to 16
    labels_N = bunch.target.tolist()
    train, test = train_test_split(
        np.arange(len(labels_N)), test_size=test_fraction, random_state=seed, stratify=labels_N
    )
    picked = {"train": sorted(train), "test": sorted(test)}
    return {split: [(images_NHW[i], labels_N[i]) for i in indices] for split, indices in picked.items()}


def torchvision_set(name: str, split: str, download_to: Path) -> Sequence[tuple[object, int]]:
    """Return a torchvision data set, downloaded if absent. Raises `UserError` if that fails."""
    from torchvision import datasets

    try:
        return getattr(datasets, name)(str(download_to), train=split == "train", download=True)
    except (OSError, RuntimeError) as error:
        raise UserError(f"torchvision could not get {name} into {download_to} ({error}); try again") from None
