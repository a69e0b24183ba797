"""The writer: pixels come back equal, bytes are reproducible, and no partial shard ever has a final name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from certizoo import UserError, shards
from certizoo.images import pixels
from certizoo.shards import DataConfig
from certizoo.shards.__main__ import main
from certizoo.shards.format import manifest
from certizoo.shards.writing import sources


def arrays(count: int, channels: int = 3, size: int = 8) -> list[tuple[np.ndarray, int]]:
    images = np.random.default_rng(1).integers(0, 256, (count, size, size, channels), dtype=np.uint8)
    return [(image, number % 3) for number, image in enumerate(images)]


def config(root: Path, channels: int = 3, size: int = 8) -> DataConfig:
    return DataConfig("toy", str(root), "toy-train-*.tar", "toy-test-*.tar", 3, size, channels)


def read_back(data: DataConfig, split: str = "train") -> tuple[list[str], torch.Tensor, torch.Tensor]:
    batches = list(shards.eval_loader(shards.find(data, split), data, batch_size=16))
    keys = [key for names, _, _ in batches for key in names]
    return keys, torch.cat([images for _, images, _ in batches]), torch.cat([labels for *_, labels in batches])


@pytest.mark.parametrize("channels", [1, 3])
def test_round_trip_keeps_every_pixel_and_label(tmp_path: Path, channels: int) -> None:
    source = arrays(53, channels)
    listing = shards.write(source, tmp_path, name="toy", split="train", per_shard=10)
    assert listing == tmp_path / "toy.json"
    _, images, labels = read_back(config(tmp_path, channels))
    restored = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
    assert torch.equal(images, torch.from_numpy(restored).permute(0, 3, 1, 2) / 255)
    written = {(image.tobytes(), label) for image, label in source}
    assert {(image.tobytes(), int(label)) for image, label in zip(restored, labels, strict=True)} == written


def test_manifest_says_what_the_shards_are(tmp_path: Path) -> None:
    shards.write(arrays(25), tmp_path, name="toy", split="train", per_shard=10)
    files = json.loads((tmp_path / "toy.json").read_text())["files"]
    assert [entry["file"] for entry in files] == [f"toy-train-{n:06d}.tar" for n in range(3)]
    assert [entry["samples"] for entry in files] == [10, 10, 5]
    listed = shards.find(config(tmp_path), "train")
    (tmp_path / "toy.json").unlink()
    walked = shards.find(config(tmp_path), "train")
    assert (listed.counts, listed.histogram) == (walked.counts, walked.histogram)
    assert listed.samples == 25
    assert listed.histogram == (9, 8, 8)
    assert listed.digest != walked.digest  # only the manifest has a digest of the content


def test_a_split_is_found_by_its_own_lines_and_earlier_manifests_are_read(tmp_path: Path) -> None:
    for split in ("train", "test"):
        shards.write(arrays(25), tmp_path, name="toy", split=split, per_shard=10)
    text = (tmp_path / "toy.json").read_text()
    assert text.count("\n") == 8
    own = manifest.read(tmp_path, "toy", config(tmp_path).test)
    assert own is not None
    assert list(own.files) == [f"toy-test-{n:06d}.tar" for n in range(3)]
    found = shards.find(config(tmp_path), "train")
    (tmp_path / "toy.json").write_text(json.dumps(json.loads(text), indent=1))
    assert shards.find(config(tmp_path), "train") == found


def test_same_seed_same_bytes_other_seed_other_order(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in "abc"]
    for root, seed in zip(roots, (0, 0, 1), strict=True):
        shards.write(arrays(20), root, name="toy", split="train", seed=seed)
    first, again, other = ((root / "toy-train-000000.tar").read_bytes() for root in roots)
    assert first == again != other


def test_shards_are_mixed_by_class(tmp_path: Path) -> None:
    sorted_source = sorted(arrays(300), key=lambda item: item[1])
    shards.write(sorted_source, tmp_path, name="toy", split="train", per_shard=100)
    files = json.loads((tmp_path / "toy.json").read_text())["files"]
    assert all(entry["classes"] == 3 for entry in files)


def test_splits_share_a_manifest_and_rewriting_needs_leave(tmp_path: Path) -> None:
    shards.write(arrays(30), tmp_path, name="toy", split="train", per_shard=10)
    shards.write(arrays(9), tmp_path, name="toy", split="test")
    with pytest.raises(UserError, match="--overwrite"):
        shards.write(arrays(5), tmp_path, name="toy", split="train")
    shards.write(arrays(5), tmp_path, name="toy", split="train", overwrite=True)
    assert shards.find(config(tmp_path), "train").samples == 5  # the two surplus shards are gone
    assert shards.find(config(tmp_path), "test").samples == 9


def test_a_corrupt_source_leaves_no_shard_under_the_final_name(tmp_path: Path) -> None:
    folder, root = tmp_path / "images", tmp_path / "root"
    for number in range(12):
        (folder / f"class{number % 3}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (number, 0, 0)).save(folder / f"class{number % 3}" / f"{number}.png")
    bad = folder / "class1" / "4.png"
    bad.write_bytes(bad.read_bytes()[:40])
    with pytest.raises(UserError, match=r"class1/4\.png.*corrupt"):
        shards.write(sources.Folder(folder), root, name="toy", split="train", per_shard=100)
    assert list(root.glob("*.tar*")) == []


def test_a_list_of_files_picks_its_images_and_keeps_the_classes(tmp_path: Path) -> None:
    folder, wanted = tmp_path / "images", tmp_path / "list.txt"
    for number in range(12):
        (folder / f"class{number % 3}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"class{number % 3}" / f"{number}.png")
    wanted.write_text("val/somewhere/4.png\n\n7.png\n11.png\n")
    command = ["folder", str(folder), str(tmp_path / "root"), "--name", "toy", "--split", "test", "--only", str(wanted)]
    main(command)
    _, images, labels = read_back(config(tmp_path / "root"), "test")
    assert {(round(float(image.max()) * 255), int(label)) for image, label in zip(images, labels, strict=True)} == {
        (4, 1), (7, 1), (11, 2),
    }  # fmt: skip
    (folder / "class0" / "4.png").write_bytes((folder / "class1" / "4.png").read_bytes())
    for text, said in (
        ("4.png\n", "4.png is there 2 times"),
        ("99.png\n", "99.png is there 0 times"),
        ("\n", "no image"),
    ):
        wanted.write_text(text)
        with pytest.raises(UserError, match=said):
            sources.Folder(folder, wanted)
    with pytest.raises(UserError, match="cannot be read"):
        sources.Folder(folder, tmp_path / "absent.txt")


def test_an_interrupted_set_is_refused(tmp_path: Path) -> None:
    class Interrupted(list):
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            if index == 17:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    with pytest.raises(KeyboardInterrupt):
        shards.write(Interrupted(arrays(40)), tmp_path, name="toy", split="train", per_shard=4)
    assert list(tmp_path.glob("*.part")) == []
    assert list(tmp_path.glob("*.tar"))  # shards are complete, but the set is not
    with pytest.raises(UserError, match="not in"):
        shards.find(config(tmp_path), "train")


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file sizes stands in for the disk; the error comes from the real write."""
    script = """
import resource, sys
from pathlib import Path
from typing import Any
import numpy as np
from certizoo import shards
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
try:
    shards.write([(pixels, 0)] * 100, Path(sys.argv[1]), name="toy", split="train")
except shards.UserError as error:
    raise SystemExit(str(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 1
    assert "toy-train-000000.tar cannot be written" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.glob("*.tar*")) == []


def image_folder(root: Path, classes: int) -> Path:
    for label in range(classes):
        (root / f"n{label}").mkdir(parents=True)
        picture = Image.new("RGB", (40 + label, 30), (10 * label, 90, 3))
        picture.save(root / f"n{label}" / "photo.JPEG", "JPEG")
        picture.save(root / f"n{label}" / "drawing.png")
    (root / "n0" / "notes.txt").write_text("not an image")
    return root


def test_folder_command_copies_files_and_keeps_classes(tmp_path: Path) -> None:
    source, root = image_folder(tmp_path / "images", 3), tmp_path / "out"
    main(["folder", str(source), str(root), "--name", "toy", "--split", "train"])
    assert json.loads((root / "toy.json").read_text())["class_names"] == ["n0", "n1", "n2"]
    shard_bytes = (root / "toy-train-000000.tar").read_bytes()
    assert all(path.read_bytes() in shard_bytes for path in source.rglob("photo.JPEG"))
    keys, images, _ = read_back(config(root, size=24))
    assert len(set(keys)) == 6
    assert images.shape == (6, 3, 24, 24)


def test_splits_with_other_classes_are_refused(tmp_path: Path) -> None:
    """A validation folder without one class would shift every later label."""
    train, test, root = (tmp_path / name for name in ("train", "test", "out"))
    image_folder(train, 3)
    image_folder(test, 2)
    main(["folder", str(train), str(root), "--name", "toy", "--split", "train"])
    with pytest.raises(SystemExit):
        main(["folder", str(test), str(root), "--name", "toy", "--split", "test"])


def test_resize_shrinks_only_what_is_larger(tmp_path: Path) -> None:
    small = Image.new("RGB", (40, 30))
    small.save(tmp_path / "a.jpg")
    assert shards.write.__module__ == "certizoo.shards.writing.write"
    from certizoo.shards.writing.write import encode

    assert encode(tmp_path / "a.jpg", resize=30) == ("jpg", (tmp_path / "a.jpg").read_bytes())
    extension, data = encode(tmp_path / "a.jpg", resize=15)

    assert extension == "jpg"
    assert pixels(data, 3).shape == (15, 20, 3)


def test_torchvision_data_sets_are_sources(tmp_path: Path) -> None:
    from torchvision.datasets import FakeData

    fake = FakeData(size=12, image_size=(3, 8, 8), num_classes=3)
    shards.write(fake, tmp_path, name="toy", split="train")
    assert shards.find(config(tmp_path), "train").samples == 12


def test_digits_command_gives_the_documented_split_twice_the_same(tmp_path: Path) -> None:
    data = DataConfig("digits", str(tmp_path), "digits-train-*.tar", "digits-test-*.tar", 10, 8, 1)
    digests = []
    for _ in range(2):
        main(["digits", str(tmp_path)])
        train, test = shards.find(data, "train"), shards.find(data, "test")
        digests.append((train.digest, test.digest))
    assert (train.samples, test.samples) == (1437, 360)
    assert max(test.histogram) - min(test.histogram) <= 3
    assert digests[0] == digests[1]
    _, images, labels = read_back(data, "test")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    known = {(image.astype(int).tobytes(), label) for image, label in zip(bunch.images, bunch.target, strict=True)}
    ink = (images[:, 0] * 16).round().to(torch.int64).numpy()
    assert all((image.tobytes(), label) in known for image, label in zip(ink, labels.tolist(), strict=True))


def test_index_lists_shards_that_exist(tmp_path: Path) -> None:
    shards.write(arrays(20), tmp_path, name="toy", split="train", per_shard=10)
    written = shards.find(config(tmp_path), "train")
    (tmp_path / "toy.json").unlink()
    main(["index", str(tmp_path), "--decode"])
    assert (tmp_path / "manifest.json").is_file()
    assert shards.find(config(tmp_path), "train") == written
    main(["index", str(tmp_path), "--name", "toy"])
    assert shards.find(config(tmp_path), "train") == written


def test_arrays_that_are_not_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="uint8"):
        shards.write([(np.zeros((8, 8)), 0)], tmp_path, name="toy", split="train")


@pytest.mark.parametrize("label", [-1, 1.5, "1", None, np.eye(3, dtype=int)[1], [0, 1]], ids=repr)
def test_labels_that_the_loader_would_refuse_are_not_written(label: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="toy-train-00000000 has the label"):
        shards.write([(np.zeros((8, 8, 3), np.uint8), label)], tmp_path, name="toy", split="train")
    assert not list(tmp_path.glob("*.tar*"))


@pytest.mark.parametrize("label", [2, np.int32(2), np.uint8(2), torch.tensor(2)], ids=repr)
def test_labels_of_every_integer_type_are_written(label: Any, tmp_path: Path) -> None:
    shards.write([(np.zeros((8, 8, 3), np.uint8), label)], tmp_path, name="toy", split="train")
    assert shards.find(config(tmp_path), "train").histogram == (0, 0, 1)
