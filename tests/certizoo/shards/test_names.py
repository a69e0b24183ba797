"""Names of sets, folders and members are taken as they are spelled: no glob, no markup, no second meaning."""

import argparse
import ast
import gzip
import io
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from certizoo import UserError, shards
from certizoo.shards import DataConfig
from certizoo.shards.__main__ import main, parser
from certizoo.shards.format.tar import ENDINGS
from tests.tools.folders import FILES, ROOT, parsed
from tests.tools.hostile_shards import png
from tests.tools.pictures import picture

ARRAYS = [(np.full((8, 8, 3), value, np.uint8), value % 2) for value in range(4)]
GLOBS = ["my [1] set", "my*", "a?b", "a/b", "../up", "[a]", "", ".hidden", "a\nb", "a b"]


def config(root: Path, ending: str = ".tar") -> DataConfig:
    return DataConfig("toy", str(root), f"toy-train-*{ending}", f"toy-test-*{ending}", 2, 8)


def written(path: Path) -> Path:
    path.write_text("sentence\tlabel\na fine film\t1\n")
    return path


# every way by which a set gets its name
NAMES: dict[str, Callable[[Path, str], object]] = {
    "write()": lambda root, name: shards.write(ARRAYS, root / "out", name=name, split="train"),
    "data.name": lambda root, name: DataConfig(name, str(root), "a", "b", 2, 8),
    "shards folder": lambda root, name: main(
        ["folder", str(root / "pictures"), str(root / "out"), f"--name={name}", "--split=train"]
    ),
    "shards text": lambda root, name: main(
        ["text", str(written(root / "s.tsv")), str(root / "out"), f"--name={name}", "--split=train"]
    ),
    "shards torchvision": lambda root, name: main(["torchvision", "MNIST", str(root / "out"), f"--name={name}"]),
    "shards index": lambda root, name: main(["index", str(root / "out"), f"--name={name}"]),
}


@pytest.mark.parametrize("name", GLOBS)
@pytest.mark.parametrize("door", NAMES)
def test_a_name_that_is_a_glob_or_a_path_is_refused_by_every_door(door: str, name: str, tmp_path: Path) -> None:
    picture(tmp_path / "pictures" / "a" / "x.png")
    with pytest.raises((UserError, SystemExit)):
        NAMES[door](tmp_path, name)
    assert not (tmp_path / "out").exists()


def test_every_command_that_takes_a_name_is_a_door() -> None:
    (commands,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    takers = {f"shards {name}" for name, each in commands.choices.items() if "--name" in each._option_string_actions}
    assert takers == {door for door in NAMES if door.startswith("shards ")}


@pytest.mark.parametrize("other", ["toy-train-2", "toy-train", "toy-train-000000"])
def test_overwriting_a_set_leaves_sets_of_longer_names(other: str, tmp_path: Path) -> None:
    shards.write(ARRAYS, tmp_path, name=other, split="train")
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    shards.write(ARRAYS, tmp_path, name="toy", split="train", per_shard=1)
    shards.write(ARRAYS, tmp_path, name="toy", split="train", overwrite=True)
    assert {path: path.read_bytes() for path in kept} == kept
    assert len([path for path in tmp_path.glob("toy-train-0*.tar") if path not in kept]) == 1


PLACES = ["[/x]", "a [bold]b", "[1-9] *", "ä [/]", "[link=x]"]


@pytest.mark.parametrize("place", PLACES)
def test_folders_of_any_spelling_hold_shards(place: str, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    root = tmp_path / place
    picture(root / "pictures" / "a [/b]" / "x.png")
    picture(root / "pictures" / "b" / "x.png")
    for split in ("train", "test"):
        main(["folder", str(root / "pictures"), str(root), "--name", "toy", "--split", split])
    main(["inspect", str(root / "pictures"), "--sheet", str(root / "sheet.png")])
    main(["index", str(root), "--name", "toy", "--decode"])
    assert shards.find(config(root), "train").samples == 2
    assert place in capsys.readouterr().err.replace("\n", "")


def test_no_console_reads_markup() -> None:
    """Names and paths of others are printed; a bracket in one must not be read as a style."""
    for file in FILES:
        for node in ast.walk(parsed(ROOT / file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Console":
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("markup") == "False", f"{file}:{node.lineno}"


def tar_of(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def test_a_dot_too_many_in_a_member_is_explained(tmp_path: Path) -> None:
    (tmp_path / "toy-test-0.tar").write_bytes(tar_of(("img.v1.2.png", png()), ("img.v1.2.cls", b"1")))
    with pytest.raises(UserError, match=r"no \.cls \(label\), but \.v1\.2\.cls: a key ends at its first dot, so name"):
        shards.find(config(tmp_path), "test")


def test_further_members_of_a_sample_are_ignored(tmp_path: Path) -> None:
    members = (("a.left.png", b"x"), ("a.png", png()), ("a.json", b"{}"), ("a.seg.cls", b"x"), ("a.cls", b"1"))
    (tmp_path / "toy-test-0.tar").write_bytes(tar_of(*members))
    assert shards.find(config(tmp_path), "test").histogram == (0, 1)


def samples(*keys: str) -> bytes:
    return tar_of(*((f"{key}.{ext}", data) for key in keys for ext, data in (("png", png()), ("cls", b"1"))))


@pytest.mark.parametrize("shards_of", [{"toy-test-0.tar": "aba"}, {"toy-test-0.tar": "ab", "toy-test-1.tar": "ca"}])
def test_index_refuses_a_key_that_the_loader_refuses(shards_of: dict[str, str], tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    for name, keys in shards_of.items():
        (tmp_path / name).write_bytes(samples(*keys))
    with pytest.raises(UserError, match="two samples have the key a"):
        list(shards.eval_loader(shards.find(config(tmp_path), "test"), config(tmp_path), batch_size=2))
    with pytest.raises(SystemExit):
        main(["index", str(tmp_path)])
    assert "two samples have the key a" in capsys.readouterr().err
    assert not (tmp_path / "manifest.json").exists()


def test_keys_may_repeat_where_the_loader_allows_it(tmp_path: Path) -> None:
    for name in ("toy-train-0.tar", "toy-train-1.tar", "toy-test-0.tar", "other-test-0.tar"):
        (tmp_path / name).write_bytes(samples("a", "b"))
    main(["index", str(tmp_path)])
    found = shards.find(config(tmp_path), "train")
    [(_, labels)] = shards.train_loader(found, config(tmp_path), batch_size=4, epoch=0, seed=0)
    assert len(labels) == found.samples == 4


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("where", ["a folder without a manifest", "a folder", "a server", "a cache"])
def test_shards_are_read_packed_and_unpacked(ending: str, where: str, tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    shards.write(ARRAYS, plain, name="toy", split="test", per_shard=2)
    packed.mkdir()
    for path in plain.glob("*.tar"):
        content = path.read_bytes()
        (packed / (path.stem + ending)).write_bytes(content if ending == ".tar" else gzip.compress(content))
    if where != "a folder without a manifest":
        main(["index", str(packed), "--decode"])
    data = config(packed, ending)
    data = replace(data, root=f"file://{packed}") if where == "a server" else data
    data = replace(data, cache=str(tmp_path / "cache")) if where == "a cache" else data
    expected, found = (
        list(shards.eval_loader(shards.find(each, "test"), each, batch_size=4)) for each in (config(plain), data)
    )
    assert found[0][0] == expected[0][0]
    assert torch.equal(found[0][1], expected[0][1])


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (gzip.compress(samples("a"))[:100], "truncated or damaged"),
        (gzip.compress(samples("a"))[:-3] + b"xxx", "truncated or damaged"),
        (gzip.compress(b"no tar" * 1000), "truncated or not a tar"),
        (gzip.compress(bytes(2**28)), "unpacks to more than 67 MB"),
    ],
    ids=["cut", "wrong sum", "no tar", "bomb"],
)
def test_a_packed_shard_that_is_damaged_or_swells_is_one_line(data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "toy-test-0.tar.gz").write_bytes(data)
    with pytest.raises(UserError, match=words):
        shards.find(config(tmp_path, ".tar.gz"), "test")
