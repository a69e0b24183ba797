"""The resumable run, without a model: rows on disk stay, and missing ones are appended in order.

Several processes: tests/certify/rows/test_workers.py.
"""

import json
from pathlib import Path

import pytest

from certify.rows import images, runner
from certify.rows.images import ImageList
from certify.rows.row_schema import Row, RowSchema
from certify.rows.workers import Batch, Crew
from certizoo import UserError
from tests.tools.stage_runs import SUBJECT, data

TOTAL, SIZE = 25, 10
HANDOVER = Path()  # no model is involved


class Label:
    """Work with rows {key, label} that records the sizes of its batches."""

    def __init__(self, handover: Path = HANDOVER, worker: int = 0) -> None:
        self.sizes = list[int]()

    def __call__(self, batch: Batch) -> list[Row]:
        self.sizes.append(len(batch[0]))
        return [{"key": key, "label": int(label)} for key, label in zip(batch[0], batch[2], strict=True)]


@pytest.fixture
def listed(digits: Path) -> ImageList:
    return images.image_list(data(digits), TOTAL, SIZE)


def subject(method: str = "any") -> dict[str, object]:
    return SUBJECT | {"images": TOTAL, "method": method}


@pytest.mark.parametrize(
    ("lines", "block", "sizes"),
    [(0, 1, [10, 10, 5]), (13, 1, [7, 5]), (13, 10, [10, 5]), (20, 10, [5]), (25, 10, [])],
)
def test_what_is_missing_is_computed_and_nothing_else(
    listed: ImageList, tmp_path: Path, lines: int, block: int, sizes: list[int]
) -> None:
    path, whole = tmp_path / "rows.jsonl", tmp_path / "whole" / "rows.jsonl"
    expected = runner.resume(whole, subject(), listed, RowSchema()).complete(Label(), HANDOVER, Label, Crew())
    assert len(expected) == TOTAL == expected["key"].nunique()
    runner.resume(path, subject(), listed, RowSchema(), block)
    text = whole.read_text().splitlines(keepends=True)
    path.write_text("".join(text[:lines]) + ("".join(text[lines : lines + 1])[:9]))  # cut off in the middle of a line
    own, done = Label(), list[tuple[int, int]]()
    run = runner.resume(path, subject(), listed, RowSchema(), block)
    table = run.complete(own, HANDOVER, Label, Crew(), lambda *now: done.append(now))
    assert table.equals(expected)
    assert own.sizes == sizes
    assert path.read_bytes() == whole.read_bytes()
    assert [now for now, _ in done] == [TOTAL - sum(sizes[k:]) for k in range(len(sizes) + 1)]
    assert all(total == TOTAL for _, total in done)


def test_rows_of_another_subject_are_left_alone(listed: ImageList, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    runner.resume(path, subject(), listed, RowSchema()).complete(Label(), HANDOVER, Label, Crew())
    before = path.read_bytes()
    with pytest.raises(UserError, match="another method"):
        runner.resume(path, subject("other"), listed, RowSchema())
    assert path.read_bytes() == before
    assert json.loads((tmp_path / "subject.json").read_text()) == subject()
