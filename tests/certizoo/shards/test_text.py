"""Sentences of a TSV file become shards, and shards become numbers of words; or one line says what is wrong."""

import json
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from certizoo import UserError
from certizoo.shards import DataConfig, SampleError, eval_loader, find, train_loader
from certizoo.shards.__main__ import main
from certizoo.shards.format import tokens
from certizoo.shards.writing import sentences
from certizoo.shards.writing.sentences import Sentences

LINES = ["sentence\tlabel", "A good film\t1", "a bad film\t0", 'a "good" bad film \t1', "bad\t0"]


def tsv(folder: Path, content: bytes | None = None) -> Path:
    path = folder / "some.tsv"
    path.write_bytes("\n".join(LINES).encode() if content is None else content)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("train", "test"):
        main(
            ["text", str(tsv(tmp_path)), str(tmp_path / "root"), "--name", "toy", "--split", split, "--per-shard", "2"]
        )
    return tmp_path / "root"


def config(root: Path, **changes: Any) -> DataConfig:
    given: dict[str, Any] = {"num_classes": 2, "img_size": 3, "kind": "text"}
    return DataConfig("toy", str(root), "toy-train-*.tar", "toy-test-*.tar", **given | changes)


def read(root: Path, **changes: Any) -> dict[str, int]:
    """Return the words of every test sentence with its label."""
    data = config(root, **changes)
    words, found = tokens.load(data.tokens).words, {}
    for _, numbers_BT, labels_B in eval_loader(find(data, "test"), data, batch_size=3):
        assert numbers_BT.dtype is torch.int64
        for row, label in zip(numbers_BT.tolist(), labels_B.tolist(), strict=True):
            found[" ".join(words[number] for number in row)] = label
    return found


def test_sentences_come_back_as_words(root: Path) -> None:
    """They are lower case and cut or padded to 3 tokens; a word that occurs once is unknown."""
    expected = {"a [UNK] film": 1, "a bad film": 0, "a [UNK] bad": 1, "bad [PAD] [PAD]": 0}
    assert read(root) == expected
    assert read(root, workers=1) == expected


def test_training_batches_are_cut_to_their_longest_sentence_and_repeat(root: Path) -> None:
    data = config(root, img_size=30)
    batches = [
        list(train_loader(find(data, "train"), data, batch_size=2, epoch=0, seed=3, skip_batches=skip))
        for skip in (0, 1)
    ]
    assert max(numbers_BN.shape[1] for numbers_BN, _ in batches[0]) == 4
    for (one, _), (other, _) in zip(batches[0][1:], batches[1], strict=True):
        assert torch.equal(one, other)


def test_a_manifest_is_made_again_and_decodes(root: Path) -> None:
    main(["index", str(root), "--name", "toy", "--decode"])
    assert find(config(root), "train").histogram == (2, 2)


FAULTS: dict[str, tuple[bytes, str]] = {
    "no column": (b"text\tlabel\na\t1\n", r"its header \(text, label\) does not have one column sentence; name it"),
    "two of a column": (b"sentence\tsentence\tlabel\na\tb\t1\n", "does not have one column sentence"),
    "an empty line": (b"sentence\tlabel\na\t1\n\nb\t1\n", "line 3 has 1 columns, but the header has 2"),
    "an empty sentence": (b"sentence\tlabel\n \t1\n", "line 2 has no sentence; remove the line"),
    "a quoted sentence": (b'sentence\tlabel\n"a, b"\t1\n', "line 2: the sentence is quoted; write the file without"),
    "a quoted line break": (b'sentence\tlabel\n"a\nb"\t1\n', "line 2 has 1 columns"),
    "another encoding": (b"sentence\tlabel\ncaf\xe9\t1\n", "line 2 is not UTF-8 text; convert the file"),
    "UTF-16": ("sentence\tlabel\na\t1\n".encode("utf-16"), "line 1 is not UTF-8 text"),
    "a control character": (b"sentence\tlabel\na\x1b[31mb\t1\n", r"line 2 holds the control character '\\x1b'"),
    "a word as label": (b"sentence\tlabel\na\tgood\n", "line 2 has the label 'good'; give the number"),
    "a label below 0": (b"sentence\tlabel\na\t-1\n", "line 2 has the label '-1'"),
    "a label in other digits": ("sentence\tlabel\na\t١\n".encode(), "line 2 has the label"),
    "a header alone": (b"sentence\tlabel\n", "holds no sentences below its header"),
    "nothing": (b"", "does not have one column sentence"),
    "a line without end": (b"sentence\tlabel\n" + b"a" * 70_000, "line 2: more than 65536 bytes in a line"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_one_line(fault: str, tmp_path: Path) -> None:
    content, words = FAULTS[fault]
    with pytest.raises(UserError, match=words) as error:
        Sentences(tsv(tmp_path, content))
    assert "\n" not in str(error.value)


def test_a_file_beyond_the_limit_or_without_a_name_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        Sentences(tmp_path / "gone.tsv")
    monkeypatch.setattr(sentences, "MAX_BYTES", 20)
    with pytest.raises(UserError, match="20 in the file; split it"):
        Sentences(tsv(tmp_path))


def test_a_mark_of_byte_order_windows_lines_and_other_columns_are_read(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbfid\ttext\tclass\r\n1\tcaf\xc3\xa9 \t2\r\n"
    assert list(Sentences(tsv(tmp_path, content), "text", "class")) == [("café".encode(), 2)]


# --- faulty samples and tokenisers -----------------------------------------------------------------------------------


def shard(root: Path, members: dict[str, bytes]) -> None:
    """Write one test shard without a manifest."""
    (root / "toy.json").unlink()
    for path in root.glob("*.tar"):
        path.unlink()
    with tarfile.open(root / "toy-test-000000.tar", "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, BytesIO(data))


SAMPLES: dict[str, tuple[dict[str, bytes], str]] = {
    "not UTF-8": ({"a.txt": b"\xff", "a.cls": b"0"}, "txt is not UTF-8"),
    "no words": ({"a.txt": b" ", "a.cls": b"0"}, "has no words"),
    "too long": ({"a.txt": b"a " * 40_000, "a.cls": b"0"}, "txt holds 80000 bytes, more than 65536"),
    "an image": ({"a.png": b"\x89PNG", "a.cls": b"0"}, r"has no \.txt \(sentence\)"),
    "neither": ({"a.json": b"{}", "a.cls": b"0"}, "has 0 images"),
}


@pytest.mark.parametrize("fault", SAMPLES)
def test_a_faulty_sentence_is_one_line(fault: str, root: Path) -> None:
    members, words = SAMPLES[fault]
    shard(root, members)
    with pytest.raises(SampleError, match=words):
        read(root)


def test_the_caption_of_an_image_is_no_sentence(root: Path) -> None:
    shard(root, {"a.txt": b"a caption", "a.png": b"not a png", "a.cls": b"0"})
    data = config(root, kind="images", channels=1)
    with pytest.raises(SampleError, match="image is corrupt"):
        list(eval_loader(find(data, "test"), data, batch_size=1))


def changed(content: dict[str, Any], **model: Any) -> dict[str, Any]:
    return content | {"model": content["model"] | model}


def test_a_tokeniser_of_somebody_else_is_one_line(root: Path) -> None:
    """Nothing but the words of the file is used."""
    path = config(root).tokens
    right = json.loads(path.read_text())
    vocabulary = right["model"]["vocab"]
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Removed", "invert": False}
    wrong: list[tuple[Any, str]] = [
        ([], "is not a tokeniser of words"),
        (changed(right, vocab={"a": 0}), "is not a tokeniser of words"),
        (changed(right, vocab=vocabulary | {"more": 77}), "is not a tokeniser of words"),
        (changed(right, vocab=vocabulary | {"more": "x"}), "is not a tokeniser of words"),
        (changed(right, vocab=vocabulary | {"m" * 300: len(vocabulary)}), "is not a tokeniser of words"),
        (changed(right, type="BPE"), "is another tokeniser than its vocabulary makes"),
        (right | {"pre_tokenizer": pattern}, "is another tokeniser than its vocabulary makes"),
        (right | {"truncation": {"max_length": 1}}, "is another tokeniser than its vocabulary makes"),
    ]
    for number, (content, words) in enumerate(wrong):
        other = root / f"{number}.json"
        other.write_text(json.dumps(content))
        with pytest.raises(UserError, match=words):
            tokens.load(other)


def test_the_tokeniser_of_a_remote_set_is_named_by_hand() -> None:
    remote = DataConfig("toy", "https://x.y/z", "*", "*", 2, 3, kind="text")
    with pytest.raises(UserError, match=r"copy its tokeniser and set data\.tokenizer=FILE"):
        _ = remote.tokens


def test_the_most_frequent_words_are_kept(tmp_path: Path) -> None:
    assert tokens.train([b"a a a b b c c c c"], tmp_path / "t.json", most=4) == 4
    assert tokens.load(tmp_path / "t.json").words == ["[PAD]", "[UNK]", "c", "a"]
