"""Each fault of a shard is one line that names the file, the sample and the fix, before and inside the loaders."""

import io
import json
import logging
import os
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from certizoo import UserError, shards
from certizoo.shards import DataConfig
from tests.tools.cases import mostly_slow

REPOSITORY = Path(__file__).resolve().parents[3]
REAL = Path(os.environ.get("CERTIZOO_DATA", REPOSITORY.parent / "shared" / "data"))
EXPECTED: dict[str, dict] = (
    json.loads((REAL / "faults" / "expected.json").read_text()) if (REAL / "faults" / "expected.json").is_file() else {}
)
needs_faults = pytest.mark.skipif(not EXPECTED, reason=f"no broken shards in {REAL / 'faults'}; set CERTIZOO_DATA")
needs_real = pytest.mark.skipif(
    not (REAL / "manifest.json").is_file(), reason=f"no shards in {REAL}; set CERTIZOO_DATA"
)


def config(root: Path, pattern: str, **changes: object) -> DataConfig:
    base = DataConfig("fault", str(root), pattern, pattern, num_classes=10, img_size=32)
    return replace(base, **changes)  # type: ignore[arg-type]


def evaluate(data: DataConfig) -> int:
    loader = shards.eval_loader(shards.find(data, "test"), data, batch_size=16)
    return sum(len(keys) for keys, _, _ in loader)


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        act()
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert "Traceback" not in message
    assert ";" in message  # (what is wrong, how to fix it)
    return message


# --- the broken shards of the data folder -------------------------------------------------------------


@needs_faults
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("file", sorted(EXPECTED) or ["absent"])
def test_every_known_fault_is_refused_by_name(file: str, workers: int) -> None:
    expected = EXPECTED[file]
    data = config(REAL / "faults", file, workers=workers)
    if expected["fault"].startswith("none"):
        assert evaluate(data) == expected["good"]
        return
    message = refusal(lambda: evaluate(data))
    assert file in message
    if "bad_keys" in expected:
        assert any(key in message for key in expected["bad_keys"])


@needs_faults
@pytest.mark.parametrize("file", sorted(name for name, known in EXPECTED.items() if "bad_keys" in known) or ["absent"])
@pytest.mark.parametrize("workers", mostly_slow((0, 2), 0))
def test_training_may_skip_faulty_samples_in_equal_steps(
    file: str, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    data = config(REAL / "faults", file, on_corrupt="skip", workers=workers)
    expected = EXPECTED[file]
    with caplog.at_level(logging.WARNING):
        found = shards.find(data, "train")
        for rank in range(2):
            how: dict[str, Any] = {"batch_size": 8, "epoch": 0, "seed": 0, "rank": rank, "world_size": 2}
            batches = list(shards.train_loader(found, data, **how))
            assert len(batches) == shards.steps_per_epoch(found, 8, 2)
            assert all(len(labels) == 8 for _, labels in batches)
            rest = list(shards.train_loader(found, data, skip_batches=1, **how))
            assert all((a[0] == b[0]).all() for a, b in zip(batches[1:], rest, strict=True))
    assert all(key in caplog.text for key in expected["bad_keys"])
    assert found.samples == expected["good"] + len(expected["bad_keys"])
    refusal(lambda: evaluate(data))  # evaluation never skips


@needs_faults
def test_skipping_is_bounded() -> None:
    data = config(REAL / "faults", "b_corrupt_jpegs.tar", on_corrupt="skip", max_corrupt=2)
    found = shards.find(data, "train")
    message = refusal(lambda: list(shards.train_loader(found, data, batch_size=16, epoch=0, seed=0)))
    assert "max_corrupt=2" in message


@needs_real
@pytest.mark.parametrize(
    ("name", "pattern", "classes", "size", "channels"),
    [
        ("cifar10", "cifar10-test-*.tar", 10, 32, 3),
        ("imagenet", "imagenet1k-sample-*.tar", 1000, 224, 3),
        ("mnist", "mnist-test-*.tar", 10, 28, 1),
    ],
)
def test_real_shards_are_read(name: str, pattern: str, classes: int, size: int, channels: int) -> None:
    data = DataConfig(name, str(REAL), pattern, pattern, classes, size, channels)
    found = shards.find(data, "test")
    assert sum(found.histogram) == found.samples
    keys, images, labels = next(iter(shards.eval_loader(found, data, batch_size=20)))
    assert images.shape == (20, channels, size, size)
    assert 0 <= images.min() < 0.3
    assert 0.7 < images.max() <= 1
    assert len(set(keys)) == len(labels) == 20


# --- faults made here ---------------------------------------------------------------------------------------------


def png(size: tuple[int, int] = (8, 8), mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, "PNG")
    return buffer.getvalue()


def tar_of(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def good(number: int) -> list[tuple[str, bytes]]:
    return [(f"s{number}.cls", b"1"), (f"s{number}.png", png())]


@pytest.mark.hostile
def test_every_shortened_shard_is_refused(tmp_path: Path) -> None:
    """Cut at every length: a shard without its end of archive is never accepted as complete."""
    whole = tmp_path / "whole.tar"
    tar_of(whole, [member for number in range(3) for member in good(number)])
    content = whole.read_bytes()
    end = len(content.rstrip(b"\0"))
    needed = -(-end // 512) * 512 + 1024
    for length in [*range(0, needed, 64), needed - 1]:
        (tmp_path / "cut.tar").write_bytes(content[:length])
        assert "cut.tar" in refusal(lambda: shards.find(config(tmp_path, "cut.tar"), "train"))
    (tmp_path / "cut.tar").write_bytes(content[:needed])
    assert shards.find(config(tmp_path, "cut.tar"), "train").samples == 3


@pytest.mark.hostile
def test_two_tars_in_one_file_are_refused(tmp_path: Path) -> None:
    tar_of(tmp_path / "one.tar", good(0))
    one = (tmp_path / "one.tar").read_bytes()
    (tmp_path / "two.tar").write_bytes(one + one)
    refusal(lambda: shards.find(config(tmp_path, "two.tar"), "train"))


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("members", "word"),
    [
        ([("s0.png", png())], "no .cls"),
        ([("s0.cls", b"1")], "0 images"),
        ([("s0.cls", b"1"), ("s0.png", png()), ("s0.jpg", png())], "2 images"),
        ([("s0.cls", b"-1"), ("s0.png", png())], "-1"),
        ([("s0.cls", b"1.5"), ("s0.png", png())], "1.5"),
        ([("s0.cls", b"10"), ("s0.png", png())], "0..9"),
        ([("s0.cls", b""), ("s0.png", png())], ".cls holds ''"),
        ([("s0.cls", b"1"), ("s0.png", b"")], "corrupt"),
        ([("s0.cls", b"1"), ("s0.png", b"GIF89a" + b"\0" * 99)], "corrupt"),
        ([("s0.cls", b"1"), ("s0.png", png((5000, 5000), "1"))], "24 million"),
        ([("s0.cls", b"1"), ("s0.png", png(mode="I;16"))], "mode I;16"),
        ([("s0.cls", b"1"), ("s0.png", b"\0" * (64 * 2**20 + 1))], "more than"),
        ([("/s0.cls", b"1"), ("/s0.png", png())], "leaves the folder"),
        ([("a/../s0.cls", b"1"), ("a/../s0.png", png())], "leaves the folder"),
    ],
)
def test_faulty_samples_are_named(tmp_path: Path, members: list[tuple[str, bytes]], word: str) -> None:
    tar_of(tmp_path / "x.tar", [*good(7), *members])
    message = refusal(lambda: evaluate(config(tmp_path, "x.tar")))
    assert "x.tar" in message
    assert "s0" in message
    assert word in message


@pytest.mark.hostile
def test_links_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        link = tarfile.TarInfo("s0.cls")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert "s0.cls" in refusal(lambda: shards.find(config(tmp_path, "x.tar"), "train"))


def test_a_set_without_one_good_sample_ends(tmp_path: Path) -> None:
    tar_of(tmp_path / "x.tar", [(f"s{n}.{ext}", b"1") for n in range(5) for ext in ("cls", "png")])
    data = config(tmp_path, "x.tar", on_corrupt="skip")
    found = shards.find(data, "train")
    refusal(lambda: list(shards.train_loader(found, data, batch_size=2, epoch=0, seed=0)))


def test_a_key_in_two_shards_is_refused_by_evaluation(tmp_path: Path) -> None:
    for name in ("x0.tar", "x1.tar"):
        tar_of(tmp_path / name, good(0))
    assert "s0" in refusal(lambda: evaluate(config(tmp_path, "x?.tar", img_size=8)))


# --- shards and manifest --------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> DataConfig:
    source = [(np.full((8, 8), number, np.uint8), number % 10) for number in range(40)]
    for split in ("train", "test"):
        shards.write(source, tmp_path, name="toy", split=split, per_shard=10)
    return DataConfig("toy", str(tmp_path), "toy-train-*.tar", "toy-test-*.tar", 10, 8, 1)


def test_another_file_than_the_manifest_says_is_refused(written: DataConfig) -> None:
    root = Path(written.root)
    victim = root / "toy-train-000001.tar"
    shutil.copy(root / "toy-train-000000.tar", victim)  # same size, other content
    assert victim.name in refusal(lambda: shards.find(written, "train"))
    assert shards.find(replace(written, verify="size"), "train").samples == 40
    victim.write_bytes(victim.read_bytes() + b"\0" * 512)
    assert victim.name in refusal(lambda: shards.find(replace(written, verify="size"), "train"))
    victim.unlink()
    assert victim.name in refusal(lambda: shards.find(written, "train"))
    assert shards.find(written, "test").samples == 40


def test_a_shard_that_changes_after_the_check_is_noticed(written: DataConfig) -> None:
    found = shards.find(written, "test")
    tar_of(Path(written.root) / "toy-test-000002.tar", good(0))
    message = refusal(lambda: list(shards.eval_loader(found, written, batch_size=8)))
    assert "toy-test-000002.tar" in message


@pytest.mark.hostile
@pytest.mark.parametrize("content", ["", "[]", "{}", '{"files": [{"file": "a.tar"}]}', '{"files": 3}'])
def test_a_malformed_manifest_is_one_line(written: DataConfig, content: str) -> None:
    (Path(written.root) / "toy.json").write_text(content)
    assert "toy.json" in refusal(lambda: shards.find(written, "train"))


def test_more_labels_than_classes_is_refused(written: DataConfig) -> None:
    assert "num_classes" in refusal(lambda: shards.find(replace(written, num_classes=9), "train"))


@pytest.mark.parametrize("name", ["digits", "cifar10", "mnist", "imagenet", "other"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_missing_shards_say_what_was_sought_and_how_to_make_them(tmp_path: Path, name: str, split: str) -> None:
    data = DataConfig(name, str(tmp_path / "none"), f"{name}-train-*.tar", f"{name}-test-*.tar", 10, 8)
    message = refusal(lambda: shards.find(data, split))
    assert f"none/{name}-{split}-*.tar" in message
    assert "certizoo shards" in message


@pytest.mark.parametrize(
    "wrong", [{"augment": "mixup"}, {"on_corrupt": "ignore"}, {"channels": 2}, {"num_classes": 1}, {"workers": -1}]
)
def test_config_values_that_do_not_exist_are_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    assert f"{next(iter(wrong))}=" in refusal(lambda: config(tmp_path, "x.tar", **wrong))


@pytest.mark.hostile
def test_no_damage_to_headers_gets_further_than_one_line(tmp_path: Path) -> None:
    """Random bytes at random places of a small shard: it is read or refused, without another exception or a hang."""
    tar_of(tmp_path / "whole.tar", [member for number in range(3) for member in good(number)])
    content = np.frombuffer((tmp_path / "whole.tar").read_bytes(), np.uint8)[:8192]
    draw = np.random.default_rng(0)
    data = config(tmp_path, "bad.tar")
    refusals = []
    for _ in range(500):
        damaged = content.copy()
        block = 512 * int(draw.integers(0, 10))
        start = block + int(draw.choice([0, 100, 124, 148, 156, 257, 345]))  # fields of a header
        damaged[start : start + int(draw.integers(1, 13))] = draw.choice([0, 48, 55, 76, 83, 120, 128, 255])
        field = damaged[block : block + 512].astype(int)
        total = field.sum() - field[148:156].sum() + 8 * 32
        damaged[block + 148 : block + 156] = np.frombuffer(b"%06o\0 " % total, np.uint8)  # a valid checksum
        (tmp_path / "bad.tar").write_bytes(damaged.tobytes())
        try:
            evaluate(data)
        except UserError as error:
            refusals.append(str(error))
    assert len(refusals) > 100
    assert all("bad.tar" in message for message in refusals)
