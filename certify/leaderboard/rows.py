"""The rows behind an entry, compared with its figures and with the rows of a recheck.

Shares of a small sample say little; a row says something about each image. If a claim comes with its rows, one forged
row in the sample is enough to refuse it.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from certify.leaderboard import nonces
from certify.leaderboard.entry import Entry, points
from certify.leaderboard.of_results import failure_of, nonces_of, summary_of
from certify.rows.row_schema import Row
from certify.stage.outcomes import CERTIFIED
from certify.stage.run import ROWS
from certizoo import UserError

NEAR = 0.05  # by this part of it a radius may be smaller with another nonce, rounding or kernel
MAX_BYTES = 2**30

Rows = dict[str, dict[str, Row]]  # norm -> key -> row


def rows_of(folders: list[Path], entry: Entry) -> Rows:
    """Return the rows of finished certificates of the entry's weights. Raises UserError."""
    found: Rows = {}
    for folder in folders:
        summary, file = summary_of(folder), folder / ROWS
        if summary["weights_sha256"] != entry["weights_sha256"]:
            raise UserError(f"the rows in {folder} are of other weights; set results= to those of the entry")
        if (of := summary["served_dtype"]) != entry["served_dtype"]:
            raise UserError(f"the rows in {folder} are of served_dtype={of or 'null'}; set results= to the entry's")
        if not file.is_file() or file.stat().st_size > MAX_BYTES:
            raise UserError(f"{file} is missing or larger than {MAX_BYTES >> 30} GiB; set results= to another folder")
        of_rows = nonces_of([summary]), summary["weights_sha256"], summary["images_sha256"], failure_of([summary])
        for fault in nonces.faults(*of_rows):
            raise UserError(f"{folder}: {fault}")
        try:
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            found[summary["norm"]] = {row["key"]: row for row in rows}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} holds invalid rows ({error!r}); certify again") from None
    return found


def shares(entry: Entry, rows: Rows) -> Iterator[str]:
    """Yield the figures of the entry that differ from those of its rows."""
    for norm, eps, point in points(entry):
        if norm in rows:
            for key, column, yes in (
                ("certified", f"certified.{eps:g}", CERTIFIED),
                ("attacked", f"pgd.{eps:g}", True),
            ):
                counted = 100 * sum(row.get(column) == yes for row in rows[norm].values()) / entry["images"]
                if point[key] is not None and abs(counted - point[key]) > 1e-3:
                    yield f"{norm} {eps:g}: {key} is {counted:.4g} in the rows, {point[key]} in the entry"


def forged(norm: str, again: list[Row], rows: Rows, method: str) -> Iterator[str]:
    """Yield the rows that differ from those of the recheck, or claim more."""
    for row in again if norm in rows else ():
        said: Mapping[str, Any] = rows[norm].get(str(row["key"]), {})
        radius, stated = float(row[f"radius.{method}"]), float(said.get(f"radius.{method}", -1.0))
        if any(said.get(key) != row[key] for key in ("label", "prediction", "correct")):
            yield f"{norm}: image {row['key']} has another label or prediction than its row"
        elif stated - radius > NEAR * max(radius, 1e-9):
            yield f"{norm}: image {row['key']} has radius {radius:.4g}, its row says {stated:.4g}"
