"""Sources of shards: anything indexable that gives (image, label), and has a length.

An image is a path, a PIL image or a uint8 array (HW, HWC). Torchvision data sets are sources as they are.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from certizoo import UserError
from certizoo.shards.format.tar import IMAGE_EXTENSIONS

log = logging.getLogger(__name__)
SPLITS = ("train", "val", "valid", "validation", "test")  # names of folders that are not classes
TORCHVISION_SETS = ("CIFAR10", "CIFAR100", "MNIST", "FashionMNIST")


class Folder(Sequence[tuple[Path, int]]):
    """A folder with a subfolder of images per class; labels number the subfolders in alphabetical order.

    Hidden files and folders are ignored, links are followed.

    Args:
        root: the folder.
        only: a text file that lists one image per line, such as a benchmark's official list; the last part of a path
            counts. The classes stay those of the folder.

    Attributes:
        others: the number of files that are not images, by suffix, and of images beside the class folders.

    Raises:
        UserError: there are no images, not exactly one of each name in `only`, the subfolders are splits (train and
            val) instead of classes, or a link leads nowhere or to a folder that is read already.
    """

    def __init__(self, root: Path, only: Path | None = None) -> None:
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; give the one that holds a subfolder of images per class")
        visible = [path for path in sorted(root.iterdir()) if not _hidden(path)]
        self.classes = [path.name for path in visible if path.is_dir()]
        _refuse_splits(root, self.classes)
        self.items: list[tuple[Path, int]] = []
        self.others: Counter[str] = Counter("image beside the class folders" for path in visible if _is_image(path))
        read: dict[Path, Path] = {}
        for label, name in enumerate(self.classes):
            files = sorted(_files(root / name, read))
            self.items += [(path, label) for path in files if _is_image(path)]
            self.others.update(path.suffix.lower() or "no suffix" for path in files if not _is_image(path))
        if not self.items:
            raise UserError(f"{root} holds no CLASS/IMAGE of {', '.join(IMAGE_EXTENSIONS)}; give another folder")
        if self.others:
            log.warning("%s: left out %s", root, self.left_out)
        if only is not None:
            self.items = _listed(self.items, only)

    @property
    def left_out(self) -> str:
        """The skipped files, in words."""
        return ", ".join(f"{count} files ({kind})" for kind, count in sorted(self.others.items()))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # the overloads of Sequence add nothing here
        return self.items[index]


def _hidden(path: Path) -> bool:
    """Return True for files that programs leave behind: .ipynb_checkpoints, .DS_Store, ._photo.jpg."""
    return path.name.startswith(".")


def _is_image(path: Path) -> bool:
    return path.is_file() and path.suffix.lower().lstrip(".") in IMAGE_EXTENSIONS


def _refuse_splits(root: Path, names: Sequence[str]) -> None:
    splits = [name for name in names if name.lower() in SPLITS]
    if len(splits) > 1:
        raise UserError(
            f"{root} holds {' and '.join(splits)}, which are splits, not classes; give one of them: "
            f"{root / splits[0]} with --split {'train' if splits[0].lower() == 'train' else 'test'}"
        )


def _files(folder: Path, read: dict[Path, Path]) -> Iterator[Path]:
    """Iterate over the visible files below a folder, following links; `read` maps real folders to their first paths.

    Raises UserError for a link to a folder that was met before: its images would count twice, or forever.
    """
    real = folder.resolve()
    if real in read:
        raise UserError(f"{folder} and {read[real]} are one folder; remove the link, or its images count twice")
    read[real] = folder
    for path in sorted(folder.iterdir()):
        if _hidden(path):
            continue
        if path.is_dir():
            yield from _files(path, read)
        elif path.exists():
            yield path
        else:
            raise UserError(f"{path} is a link to a file that does not exist; repair or remove it")


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


def digits(seed: int = 0) -> dict[str, list[tuple[NDArray[np.uint8], int]]]:
    """Return the 1797 handwritten digits of scikit-learn (8 x 8, gray), split 1437 / 360 and balanced by class."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images_NHW = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # the set counts ink from 0 to 16
    labels_N = bunch.target.tolist()
    train, test = train_test_split(np.arange(len(labels_N)), test_size=0.2, random_state=seed, stratify=labels_N)
    picked = {"train": sorted(train), "test": sorted(test)}
    return {split: [(images_NHW[i], labels_N[i]) for i in indices] for split, indices in picked.items()}


def torchvision_set(name: str, split: str, download_to: Path) -> Sequence[tuple[object, int]]:
    """Return a torchvision data set, downloaded if absent. Raises `UserError` if that fails."""
    from torchvision import datasets

    try:
        return getattr(datasets, name)(str(download_to), train=split == "train", download=True)
    except (OSError, RuntimeError) as error:
        raise UserError(f"torchvision could not get {name} into {download_to} ({error}); try again") from None
