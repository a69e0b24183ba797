"""A folder of images becomes the classes that a person sees in it, or one line says what is unusual."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from certizoo import UserError
from certizoo.shards.__main__ import main
from certizoo.shards.writing import sources
from certizoo.shards.writing.inspect import inspect
from tests.tools.pictures import picture


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    for number in range(12):
        picture(tmp_path / "pets" / "cat" / f"{number:02}.png", number)
        picture(tmp_path / "pets" / "dog" / "deep" / f"{number:02}.png", 100 + number)
    return tmp_path / "pets"


def elsewhere(root: Path) -> Path:
    picture(root.parent / "elsewhere" / "x.png", 200)
    return root.parent / "elsewhere"


# what is left behind in a folder: the classes and the number of images stay 2 and 24
HIDDEN: dict[str, Callable[[Path], object]] = {
    "a hidden class": lambda root: picture(root / ".ipynb_checkpoints" / "00-checkpoint.png"),
    "a hidden class that comes first": lambda root: picture(root / ".a" / "b" / "c.png"),
    "a hidden folder in a class": lambda root: picture(root / "cat" / ".ipynb_checkpoints" / "00-checkpoint.png"),
    "a hidden image": lambda root: picture(root / "cat" / "._00.png"),
    "a hidden link": lambda root: (root / ".again").symlink_to(root, target_is_directory=True),
}
# links: they count as what they lead to
LINKS: dict[str, Callable[[Path], object]] = {
    "to a folder in a class": lambda root: (root / "cat" / "more").symlink_to(elsewhere(root)),
    "to a picture": lambda root: (root / "cat" / "more.png").symlink_to(elsewhere(root) / "x.png"),
    "to a class": lambda root: (root / "bird").symlink_to(elsewhere(root)),
}
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder twice": (lambda root: (root / "cat" / "more").symlink_to(root / "dog"), "are one folder; remove"),
    "a circle": (lambda root: (root / "cat" / "more").symlink_to(root / "cat"), "are one folder; remove the link"),
    "a link to nothing": (lambda root: (root / "cat" / "x.png").symlink_to("gone"), "x.png is a link to a file that"),
    "splits": (lambda root: [picture(root / split / "cat" / "x.png") for split in ("train", "val")],
               "holds train and val, which are splits, not classes; give one of them: .*/train with --split train"),
    "splits in capitals": (lambda root: [picture(root / split / "cat" / "x.png") for split in ("Valid", "Test")],
                           "holds Test and Valid.*/Test with --split test"),
}  # fmt: skip
WARNED: dict[str, tuple[Callable[[Path], object], str]] = {
    "other formats": (lambda root: (root / "cat" / "x.heic").write_bytes(b""), r"left out 1 files \(\.heic\)"),
    "beside the classes": (lambda root: picture(root / "x.png"), r"left out 1 files \(image beside the class"),
    "an empty class": (lambda root: (root / "bird").mkdir(), "class bird has 0 images"),
    "a small class": (lambda root: picture(root / "bird" / "x.png"), "class bird has 1 images"),
    "uneven classes": (lambda root: picture(root / "bird" / "x.png"), "uneven: 12 images of the largest, 1 of the"),
    "a corrupt sample": (lambda root: (root / "cat" / "00.png").write_bytes(b"x"), "cat/00.png: the image is corrupt"),
    "numbers without zeros": (
        lambda root: [root.joinpath(old).rename(root / new) for old, new in (("cat", "10"), ("dog", "2"))],
        "labels follow the alphabet: folder 10 is label 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HIDDEN)
def test_hidden_files_are_no_classes_and_no_images(kind: str, pets: Path) -> None:
    HIDDEN[kind](pets)
    source = sources.Folder(pets)
    assert (source.classes, len(source)) == (["cat", "dog"], 24)


@pytest.mark.parametrize("kind", LINKS)
def test_links_are_followed(kind: str, pets: Path) -> None:
    LINKS[kind](pets)
    source = sources.Folder(pets)
    assert len(source) == 25
    assert 200 in {Image.open(path).getpixel((0, 0))[0] for path, _ in source.items}  # type: ignore[index]


@pytest.mark.parametrize("command", ["folder", "inspect"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_give_wrong_classes_is_one_line(kind: str, command: str, pets: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    make, words = REFUSED[kind]
    make(pets)
    with pytest.raises(UserError, match=words):
        sources.Folder(pets)
    rest = [str(tmp_path / "out"), "--name", "pets", "--split", "train"] if command == "folder" else []
    with pytest.raises(SystemExit):
        main([command, str(pets), *rest])
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", WARNED)
def test_what_is_seldom_meant_is_a_warning_before_anything_is_written(kind: str, pets: Path) -> None:
    make, words = WARNED[kind]
    assert not inspect(pets).warnings
    make(pets)
    assert [warning for warning in inspect(pets).warnings if re.search(words, warning)]


def test_one_class_may_be_one_folder_too_deep(pets: Path) -> None:
    assert "there is one class, deep; give the folder above" in inspect(pets / "dog").warnings[0]


def test_every_image_is_decoded_on_demand(pets: Path) -> None:
    (pets / "cat" / "01.png").write_bytes(b"x")  # not among the evenly spaced samples
    assert not inspect(pets).warnings
    assert "01.png" in inspect(pets, every=True).warnings[0]


def test_the_command_shows_classes_and_writes_the_sheet_alone(pets: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    before = set(tmp_path.rglob("*"))
    main(["inspect", str(pets), "--sheet", str(tmp_path / "sheet.png")])
    said = capsys.readouterr().err
    assert all(word in said for word in ("0     │ cat   │ 12", "1     │ dog   │ 12", "24 images", "sheet.png"))
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "sheet.png"}
    colours = {colour for _, colour in Image.open(tmp_path / "sheet.png").getcolors(10**6)}  # type: ignore[union-attr]
    assert {(0, 0, 0), (10, 0, 0), (100, 0, 0)} <= colours
    assert np.asarray(Image.open(tmp_path / "sheet.png")).shape[2] == 3


def test_a_thousand_classes_have_a_bounded_sheet(tmp_path: Path) -> None:
    for label in range(60):
        (tmp_path / f"{label:03}").mkdir()
    picture(tmp_path / "059" / "x.png")
    found = inspect(tmp_path)
    assert (len(found.classes), sum(found.counts)) == (60, 1)
    assert any("first 40 of 60 classes" in warning for warning in found.warnings)
