"""Properties in the simple form of VNN-LIB are read as written; any other form is refused."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.vnncomp import contents
from benchmarks.vnncomp.contents import content
from benchmarks.vnncomp.vnnlib import parse
from certizoo import UserError
from tests.tools.exported_vit import MEAN, STD, written

PIXELS = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(0))
GOOD = written(PIXELS, 1 / 255, 2, 4)


def test_boxes_and_labels_are_as_written() -> None:
    said = parse(GOOD.encode(), "p")
    mean, std = (np.array(statistic).reshape(3, 1, 1) for statistic in (MEAN, STD))
    for side, step in ((said.lower_I, -1 / 255), (said.upper_I, 1 / 255)):
        expected = ((PIXELS.double().numpy() + step).clip(0, 1) - mean) / std
        assert abs(side.reshape(3, 4, 4) - expected).max() < 1e-6
    assert said.label == 2


def test_layout_says_nothing() -> None:
    again = " ".join(line.partition(";")[0] for line in GOOD.splitlines())
    one, other = parse(GOOD.encode(), "p"), parse(again.encode(), "p")
    assert (one.lower_I == other.lower_I).all()
    assert one.label == other.label


SMALL = """(declare-const X_0 Real)
(declare-const Y_0 Real)
(declare-const Y_1 Real)
(assert (<= X_0 0.5))
(assert (>= X_0 -0.5))
(assert (or (and (>= Y_1 Y_0)) ))
"""
HOSTILE = {
    "nothing": "",
    "nonsense": "\x00\xff nonsense",
    "open": SMALL[:-4],
    "unbounded below": SMALL.replace("(assert (>= X_0 -0.5))\n", ""),
    "unbounded above": SMALL.replace("(assert (<= X_0 0.5))\n", ""),
    "bound twice": SMALL + "(assert (<= X_0 0.1))\n",
    "declared twice": SMALL + "(declare-const X_0 Real)\n",
    "a gap": SMALL.replace("X_0", "X_7"),
    "empty box": SMALL.replace("-0.5", "0.7"),
    "infinite": SMALL.replace("0.5", "1e999"),
    "no number": SMALL.replace("0.5", "nan"),
    "no output": SMALL[: SMALL.index("(assert (or")],
    "two outputs": SMALL + "(assert (or (and (>= Y_1 Y_0)) ))",
    "too few rivals": SMALL.replace("(declare-const Y_1 Real)", "(declare-const Y_1 Real)\n(declare-const Y_2 Real)"),
    "undeclared rival": SMALL.replace("(declare-const Y_1 Real)\n", ""),
    "rival twice": SMALL.replace("(and (>= Y_1 Y_0))", "(and (>= Y_1 Y_0)) (and (>= Y_1 Y_0))"),
    "two labels": SMALL.replace("(and (>= Y_1 Y_0))", "(and (>= Y_1 Y_0)) (and (>= Y_0 Y_1))"),
    "rival itself": SMALL.replace("Y_1 Y_0", "Y_0 Y_0"),
    "other order": SMALL.replace("(>= Y_1 Y_0)", "(<= Y_1 Y_0)"),
    "conjunction": SMALL.replace("(and (>= Y_1 Y_0))", "(and (>= Y_1 Y_0) (>= Y_0 Y_1))"),
    "sum": SMALL.replace("X_0 0.5", "(+ X_0 X_0) 0.5"),
    "huge index": SMALL.replace("X_0", "X_" + "9" * 5000),
    "huge number": SMALL.replace("0.5", "9" * 5000),
    "other digits": SMALL.replace("X_0", "X_\u0660"),
    "deep": "(" * 100_000,
    "long": SMALL + "(assert " * 100_000,
    "escape": SMALL + "\x1b[31m",
}


@pytest.mark.hostile
@pytest.mark.parametrize("case", HOSTILE)
def test_another_form_is_refused_in_one_line(case: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(HOSTILE[case].encode("utf-8", "surrogateescape"), "given.vnnlib")
    message = str(caught.value)
    assert message.startswith("given.vnnlib ")
    assert len(message) < 300
    assert "\n" not in message
    assert "\x1b" not in message


def test_the_small_form_is_read() -> None:
    """The text that the hostile cases modify is itself valid."""
    assert parse(SMALL.encode(), "p").label == 0


# files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.hostile
@pytest.mark.parametrize(
    "name", ["", "absent", "/etc/passwd", "../up", "onnx/../../up", "link", "folder", "damaged", "a\0b", "x" * 5000]
)
def test_only_files_below_the_folder_are_read(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "benchmark"
    (folder / "folder").mkdir(parents=True)
    (tmp_path / "up").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "up")
    (folder / "damaged.gz").write_bytes(b"\x1f\x8b\x08 nonsense")
    with pytest.raises(UserError) as caught:
        content(folder, name)
    assert len(str(caught.value)) < 1000


@pytest.mark.hostile
@pytest.mark.parametrize("packed", [False, True])
def test_a_huge_file_is_refused_before_it_is_whole(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "MAX_BYTES", 1000)
    for size in (1000, 1001):
        body = bytes(size)
        (tmp_path / f"{size}{'.gz' * packed}").write_bytes(gzip.compress(body) if packed else body)
    assert content(tmp_path, "1000") == bytes(1000)
    with pytest.raises(UserError, match="holds more than"):
        content(tmp_path, "1001")
