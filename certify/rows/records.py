"""Rows on disk: a line for each image, written as soon as it is computed, all of one subject (`summary.subject_of`); a
second start goes on after the last whole line."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from certizoo import UserError
from certizoo.files import write_whole

SUBJECT = "subject.json"
Row = dict[str, Any]


def resume(path: Path, subject: Mapping[str, Any], block: int = 1) -> list[Row]:
    """Rows of an earlier start with the same subject, kept in the folder's `subject.json`; a last line that was cut off
    is dropped, and a last block of rows that is not whole. `subject["images"]` says how many rows there will be.

    Raises UserError where the folder holds the rows of another subject.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    note = path.parent / SUBJECT
    if note.exists():
        before = json.loads(note.read_text())
        changed = sorted(key for key in subject if before.get(key) != subject[key])
        if changed:
            raise UserError(
                f"{path.parent} holds results with another {changed[0]}; remove that folder or choose another out=DIR"
            )
    write_json(note, subject)
    if not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    if len(whole) < subject["images"]:
        whole = whole[: len(whole) // block * block]
    path.write_text("".join(whole))
    return [json.loads(line) for line in whole]


def append(path: Path, rows: list[Row]) -> None:
    """On the disk when it returns."""
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    write_whole(path, json.dumps(content, indent=2) + "\n")


def write_csv(path: Path, table: pd.DataFrame) -> None:
    """Whole or not at all."""
    write_whole(path, table.to_csv(index=False))
