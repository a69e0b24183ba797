"""Rows on disk: a line for each image, written as soon as it is computed, all of one subject (`summary.subject_of`); a
second start goes on after the last whole line.

One process at a time writes to a folder of results (`sole_writer`), and what it reads there it reads while it holds it.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certify.rows.row_schema import Listed, Row, RowSchema
from certizoo import UserError
from certizoo.documents import read_json
from certizoo.files import disk_errors, sha256, whole_file, write_whole
from certizoo.locks import sole_writer

if TYPE_CHECKING:
    import pandas as pd

SUBJECT, DIGESTS = "subject.json", "rows_sha256"
CERTIFICATES, CERTIFICATE = "certificates.jsonl", "certificate.json"  # which an evaluation reads, too
UNSAID = {"norm": "l2", "first": 0}  # what rows of earlier code are of, whose subject does not say it
SAME_NONCE = ("nonce_origin", "beacon")  # of a subject: what is said of the nonce, which itself decides the rows
OF_IMAGES = ("first", "images", "images_sha256")  # of a subject: in which the ranges of one result differ


@contextmanager
def results(folder: Path) -> Iterator[None]:
    """Write results to `folder` as the only process. Raises UserError at once where another does, and where the disk
    refuses a file."""
    again = "make room there, then the same command goes on after the last row"
    with disk_errors(again), sole_writer(folder, "results", "choose another out=DIR"):
        yield


def resume(
    path: Path, subject: Mapping[str, Any], images: Sequence[Listed], columns: RowSchema, block: int = 1
) -> list[Row]:
    """Rows of an earlier start with the same subject, kept in the folder's `subject.json`: those of the first `images`.
    A last line that was cut off is dropped, and a last block of rows that is not whole.

    Raises UserError where the folder holds the rows of another subject, or of other images, or anything else.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _same_subject(path, json.loads(json.dumps(subject)))
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    rows = [_parsed(line) for line in whole]
    require(rows, images, columns, path)
    if len(rows) < len(images):
        rows = rows[: len(rows) // block * block]
    if len(rows) < len(lines):
        with whole_file(path) as part:
            part.write_bytes(b"".join(whole[: len(rows)]))
    return rows


def rows_at(path: Path) -> list[Row]:
    """The rows of a finished result. Raises UserError where a line is none."""
    rows = [_parsed(line) for line in path.read_bytes().splitlines()]
    if not all(isinstance(row, dict) and isinstance(row.get("key"), str) for row in rows):
        raise UserError(f"{path} has a line that is no row of an image; make that result again")
    return rows


def begins(folder: Path) -> int:
    """The first image of a result, -1 where it does not say: `taken_over` refuses such a one."""
    try:
        return _first(_said(folder / SUBJECT))
    except UserError:
        return -1


def taken_over(
    path: Path, folder: Path, rows: Sequence[Row], images: Sequence[Listed], columns: RowSchema
) -> list[Row]:
    """The rows that `folder` has of the images after those of `rows`: a finished result of a range of the same subject
    as that of `path`, which begins where `rows` end or before.

    Raises UserError where it is of something else, or begins later.
    """
    part = folder / path.name
    try:
        lines = part.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"parts: {part} cannot be read ({error.strerror}); give folders of results") from None
    theirs, ours = _said(folder / SUBJECT), _said(path.parent / SUBJECT)
    if changed := _changed(theirs, ours, (*OF_IMAGES, *SAME_NONCE)):
        raise UserError(f"parts: {folder} holds results with another {changed}; certify that range with it")
    found = [_parsed(line) for line in lines]
    if len(found) != theirs.get("images"):
        raise UserError(f"parts: {folder} has {len(found)} rows of {theirs.get('images')}; let it finish first")
    first, own_first = _first(theirs), ours["first"]
    if not 0 <= first - own_first <= len(rows):
        raise UserError(
            f"parts: {folder} begins with image {first}, and there are rows of {own_first} to {own_first + len(rows)}; "
            "give the folder of what lies between, too"
        )
    begin = first - own_first
    if fault := columns.fault(found, images[begin:]):
        raise UserError(f"parts: {part}: line {fault[0] + 1} {fault[1][:300]}; certify that range again")
    return found[len(rows) - begin :]


def require(rows: Sequence[Any], images: Sequence[Listed], columns: RowSchema, path: Path) -> None:
    """Raises UserError naming the first row that is not the one of its image."""
    if found := columns.fault(rows, images):
        place, said = found
        raise UserError(
            f"{path}: line {place + 1} {said[:300]}; remove {path.parent}, or keep the lines before that one "
            f"(head -n {place})"
        )


def append(path: Path, rows: list[Row]) -> None:
    """On the disk when it returns."""
    try:
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)  # what `write` raises names nothing
        raise


def digests(folder: Path, *names: str) -> dict[str, dict[str, str | None]]:
    """The files of rows that a summary was made of, as it says them."""
    return {DIGESTS: {name: _digest(folder / name) for name in names}}


def require_rows(summary: Path, *names: str) -> dict[str, Any]:
    """What a summary says, {} where there is none yet. Raises UserError where one of the files `names` beside it is not
    the one that it was made of; a summary of earlier code says nothing of them."""
    if not summary.exists():
        return {}
    content = read_json(summary)
    said = content.get(DIGESTS, {}) if isinstance(content, dict) else None
    if not isinstance(said, dict):
        raise UserError(f"{summary} is no summary of results; remove it, and the same command makes it again")
    for name in names:
        if name in said and said[name] != _digest(summary.with_name(name)):
            raise UserError(
                f"{summary} was not made of the {name} beside it, which is missing or was changed; remove "
                f"{summary.name} and have it made of these rows, or remove the folder"
            )
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    write_whole(path, json.dumps(content, indent=2) + "\n")


def write_csv(path: Path, table: "pd.DataFrame") -> None:
    """Whole or not at all."""
    write_whole(path, table.to_csv(index=False))


def write_parquet(path: Path, table: "pd.DataFrame") -> None:
    """Whole or not at all."""
    with whole_file(path) as part:
        table.to_parquet(part, index=False)


def write_png(path: Path, figure: Any) -> None:
    """A figure of matplotlib, whole or not at all."""
    with whole_file(path) as part:
        figure.savefig(part, dpi=150, format="png")


def _same_subject(path: Path, subject: Row) -> None:
    """Without any rows in its folder a subject is of nothing, and another takes its place."""
    note = path.parent / SUBJECT
    if not any(path.parent.glob("*.jsonl")):
        write_json(note, subject)
        return
    if changed := _changed(_said(note), subject, SAME_NONCE):
        raise UserError(
            f"{path.parent} holds results with another {changed}; remove that folder or choose another out=DIR"
        )


def _said(note: Path) -> Row:
    """A `subject.json`."""
    if not note.exists():
        raise UserError(f"{note.parent} holds rows without the {SUBJECT} that says of what; remove that folder")
    content = read_json(note)
    if not isinstance(content, dict):
        raise UserError(f"{note} does not say what these results are of; remove {note.parent}")
    return content


def _first(subject: Row) -> int:
    """The first of its images, -1 where it names none."""
    first = subject.get("first", UNSAID["first"])
    return first if type(first) is int else -1


def _changed(before: Mapping[str, Any], subject: Mapping[str, Any], but: Sequence[str] = ()) -> str | None:
    """The first key, `but` for some, in which two subjects differ."""
    before = {key: value for key, value in UNSAID.items() if key in subject} | dict(before)
    absent = object()
    keys = dict.fromkeys([*subject, *before])  # in their order: the norm comes before the attack that follows from it
    changed = (key for key in keys if key not in but and before.get(key, absent) != subject.get(key, absent))
    return next(changed, None)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _digest(path: Path) -> str | None:
    return sha256(path) if path.is_file() else None
