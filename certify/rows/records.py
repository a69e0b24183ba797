"""Rows on disk: a line for each image, written as soon as it is computed, all of one subject (`summary.subject_of`).

A second start continues after the last whole line. One process at a time writes to a folder of results (`sole_writer`),
and it reads the folder only while it holds it.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from certify.rows.row_schema import Listed, Row, RowSchema
from certizoo import UserError
from certizoo.documents import read_json
from certizoo.files import disk_errors, sha256, whole_file, write_whole
from certizoo.locks import sole_writer

if TYPE_CHECKING:
    import pandas as pd

SUBJECT, DIGESTS = "subject.json", "rows_sha256"
CERTIFICATES, CERTIFICATE = "certificates.jsonl", "certificate.json"  # an evaluation reads them, too
KEYS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("weights_sha256", "data_digest", "images_sha256", "certizoo"), (str,)),
    **dict.fromkeys(("norm", "nonce", "nonce_origin"), (str,)),
    **dict.fromkeys(("method", "served_dtype", "beacon"), (str, NoneType)),
    **dict.fromkeys(("first", "images"), (int,)),  # true is no number
}  # of every subject and summary
SAME_NONCE = ("nonce_origin", "beacon")  # keys that may differ, as only the nonce itself decides rows
OF_IMAGES = ("first", "images", "images_sha256")  # keys in which the ranges of one result differ


@contextmanager
def results(folder: Path) -> Iterator[None]:
    """Write results to `folder` as the only process.

    Raises UserError at once if another process does, and if the disk refuses a file.
    """
    again = "make room there, then run the same command again: it continues after the last row"
    with disk_errors(again), sole_writer(folder, "results", "choose another out=DIR"):
        yield


def resume(
    path: Path, subject: Mapping[str, Any], images: Sequence[Listed], columns: RowSchema, block: int = 1
) -> list[Row]:
    """Return the rows of an earlier start with the same subject: those of the first `images`.

    The subject is kept in the folder's `subject.json`. A truncated last line is dropped, and so is an incomplete last
    block of rows.

    Raises UserError if the folder holds the rows of another subject or of other images, or anything else.
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
    """Return the rows of a finished result. Raises UserError if a line is invalid."""
    rows = [_parsed(line) for line in path.read_bytes().splitlines()]
    if not all(isinstance(row, dict) and isinstance(row.get("key"), str) for row in rows):
        raise UserError(f"{path} has a line that is not a row of an image; compute that result again")
    return rows


def begins(folder: Path) -> int:
    """Return the index of a result's first image; -1 if it has no valid subject, which `taken_over` refuses."""
    try:
        return int(subject_in(folder)["first"])
    except UserError:
        return -1


def subject_in(folder: Path) -> Row:
    """Return the subject of the results in a folder. Raises UserError if there is none, or if it is invalid."""
    if not (folder / SUBJECT).exists():
        raise UserError(f"{folder} is no folder of results, as it has no {SUBJECT}; choose another out=DIR")
    return _whole(folder / SUBJECT, KEYS)


def taken_over(
    path: Path, folder: Path, rows: Sequence[Row], images: Sequence[Listed], columns: RowSchema
) -> list[Row]:
    """Return the rows that `folder` has for the images after those of `rows`.

    `folder` holds a finished result of a range of the same subject as that of `path`, which begins where `rows` end or
    before. Raises UserError if it holds anything else, or begins later.
    """
    part = folder / path.name
    try:
        lines = part.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"parts: {part} cannot be read ({error.strerror}); set parts= to folders of results") from None
    theirs, ours = subject_in(folder), subject_in(path.parent)
    if changed := _changed(theirs, ours, (*OF_IMAGES, *SAME_NONCE)):
        raise UserError(f"parts: {folder} holds results with another {changed}; certify that range with the same")
    found = [_parsed(line) for line in lines]
    if len(found) != theirs["images"]:
        raise UserError(f"parts: {folder} has {len(found)} rows of {theirs['images']}; finish that range first")
    first, own_first = theirs["first"], ours["first"]
    if not 0 <= first - own_first <= len(rows):
        raise UserError(
            f"parts: {folder} begins with image {first}, but there are rows of {own_first} to {own_first + len(rows)}; "
            "add the folder of the range between"
        )
    begin = first - own_first
    if fault := columns.fault(found, images[begin:]):
        raise UserError(f"parts: {part}: line {fault[0] + 1} {fault[1][:300]}; certify that range again")
    return found[len(rows) - begin :]


def require(rows: Sequence[Any], images: Sequence[Listed], columns: RowSchema, path: Path) -> None:
    """Raise UserError naming the first row that does not match its image."""
    if found := columns.fault(rows, images):
        place, said = found
        raise UserError(
            f"{path}: line {place + 1} {said[:300]}; remove {path.parent}, or keep the lines before that one "
            f"(head -n {place})"
        )


def append(path: Path, rows: list[Row]) -> None:
    """Append rows and return once they are on the disk."""
    try:
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)  # errors of `write` name no file
        raise


def digests(folder: Path, *names: str) -> dict[str, dict[str, str | None]]:
    """Return the digests of the files of rows, for the summary made from them."""
    return {DIGESTS: {name: _digest(folder / name) for name in names}}


def require_rows(summary: Path, *names: str, **keys: type) -> dict[str, Any]:
    """Return the content of a summary with these further `keys`, {} if there is none yet.

    Raises UserError if one of the files `names` beside it has changed since, or if another version wrote it.
    """
    if not summary.exists():
        return {}
    content = _whole(summary, KEYS | {DIGESTS: (dict,)} | {key: (kind,) for key, kind in keys.items()})
    for name in names:
        if content[DIGESTS].get(name) != _digest(summary.with_name(name)):
            raise UserError(
                f"{summary} was not made from the {name} beside it, which is missing or was changed; remove "
                f"{summary.name} to write it again from these rows, or remove the folder"
            )
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_whole(path, json.dumps(content, indent=2) + "\n")


def write_csv(path: Path, table: "pd.DataFrame") -> None:
    """Write a table as CSV atomically."""
    write_whole(path, table.to_csv(index=False))


def write_parquet(path: Path, table: "pd.DataFrame") -> None:
    """Write a table as Parquet atomically."""
    with whole_file(path) as part:
        table.to_parquet(part, index=False)


def write_png(path: Path, figure: Any) -> None:
    """Write a matplotlib figure atomically."""
    with whole_file(path) as part:
        figure.savefig(part, dpi=150, format="png")


def _same_subject(path: Path, subject: Row) -> None:
    """Record the subject, or raise UserError if the folder holds rows of another one.

    A folder without rows belongs to no subject, so a new one replaces its record.
    """
    if not any(path.parent.glob("*.jsonl")):
        write_json(path.parent / SUBJECT, subject)
        return
    if changed := _changed(subject_in(path.parent), subject, SAME_NONCE):
        raise UserError(
            f"{path.parent} holds results with another {changed}; remove that folder or choose another out=DIR"
        )


def _whole(path: Path, keys: Mapping[str, tuple[type, ...]]) -> Row:
    """Read a subject or summary. Raises UserError if a key that this version writes is missing or invalid."""
    content = read_json(path)
    said: Row = content if isinstance(content, dict) else {}
    if wrong := [key for key, kinds in keys.items() if type(said.get(key, ...)) not in kinds]:
        raise UserError(
            f"{path} was written by another version, as its {wrong[0]} is missing or invalid; remove {path.parent} and "
            "certify again"
        )
    return said


def _changed(before: Mapping[str, Any], subject: Mapping[str, Any], but: Sequence[str] = ()) -> str | None:
    """Return the first key, except those in `but`, in which two subjects differ."""
    absent = object()
    keys = dict.fromkeys([*subject, *before])  # in order: the norm comes before the attack that follows from it
    changed = (key for key in keys if key not in but and before.get(key, absent) != subject.get(key, absent))
    return next(changed, None)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _digest(path: Path) -> str | None:
    return sha256(path) if path.is_file() else None
