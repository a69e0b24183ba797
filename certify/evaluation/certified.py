"""The results of a finished certification, which an evaluation uses instead of computing them again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from certify.rows import records
from certify.rows.draws import Nonce, recorded
from certify.rows.row_schema import Listed, Row, RowSchema, amount, chance
from certify.rows.summary import Summary
from certizoo import UserError

SAME = {"weights_sha256": "weights", "data_digest": "data", "certizoo": "version of certizoo"}


@dataclass(frozen=True)
class Certified:
    """The summary in a folder of results, and its rows by image key."""

    folder: Path
    said: Summary
    rows: Mapping[str, Row]

    @property
    def norm(self) -> str:
        norm: str = self.said["norm"]
        return norm

    @property
    def method(self) -> str:
        method: str = self.said["method"]
        return method

    @property
    def nonce(self) -> str:
        return self.recorded.text

    @property
    def recorded(self) -> Nonce:
        return recorded(self.said)

    def of(self, subject: Summary, images: Sequence[Listed]) -> dict[str, Row]:
        """Return the rows of these images.

        Raises UserError if they belong to another `subject` (rows.summary.subject_of), or if a row is missing or
        invalid.
        """
        for key, words in SAME.items():
            if self.said[key] != subject[key]:
                raise UserError(f"certificate={self.folder} is of another {words}; certify again, or leave it out")
        names = {f"radius.{self.method}": amount, "seconds": amount, "failure": chance}
        columns = RowSchema(names, {"": lambda value: True})
        for image in images:
            if image.key not in self.rows:
                raise UserError(
                    f"certificate={self.folder} has no row of image {image.key}; set images= and first= as it has"
                )
            if fault := columns.fault([self.rows[image.key]], [image]):
                raise UserError(f"certificate={self.folder}: a row {fault[1][:300]}; certify these images again")
        return {image.key: self.rows[image.key] for image in images}


def read(folder: Path) -> Certified:
    """Read the folder of a finished certification. Raises UserError if it is not one, or has changed since."""
    said = records.require_rows(folder / records.CERTIFICATE, records.CERTIFICATES)
    if not said:
        raise UserError(f"certificate={folder} holds no finished certification; set it to a folder that certify wrote")
    if said["served_dtype"] not in (None, "float32"):
        raise UserError(f"certificate={folder} is of a model served in {said['served_dtype']}; attacks take float32")
    return Certified(folder, said, {row["key"]: row for row in records.rows_at(folder / records.CERTIFICATES)})
