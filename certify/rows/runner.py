"""One resumable run over an image list: rows on disk are kept, missing ones are computed and appended."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from certify.rows import records
from certify.rows.images import ImageList
from certify.rows.row_schema import Row, RowSchema
from certify.rows.summary import Summary
from certify.rows.workers import RAY, Batch, Crew, Make, Work, by_processes
from certizoo import UserError
from certizoo.progress import Progress, silent


@dataclass(frozen=True)
class Run:
    """The rows at `path` so far, those of the first images of `listed`."""

    path: Path
    listed: ImageList
    columns: RowSchema
    rows: list[Row]

    def with_parts(self, parts: Sequence[Path]) -> "Run":
        """Return the run with the rows of finished results of the images that follow, which are also written here."""
        rows = list(self.rows)
        for part in sorted(parts, key=records.begins):
            new = records.taken_over(self.path, part, rows, self.listed.images, self.columns)
            records.append(self.path, new)
            rows += new
        return replace(self, rows=rows)

    def complete(self, own: Work, handover: Path, make: Make, crew: Crew, progress: Progress = silent) -> pd.DataFrame:
        """Compute the missing rows, writing each batch when it is done, and return the table.

        The table has exactly one row per image, in the order of the list.

        Args:
            own: turns a batch into its rows in this process.
            handover: the hand-over, for other workers.
            make: called by each other worker of the crew with the hand-over and its number to get the same.
            crew: the processes that compute the rows.
            progress: called before the first batch and after every one.
        """
        rows = list(self.rows)
        missing = self.listed.batches(skip=len(rows))
        progress(len(rows), self.listed.total)
        with closing(_computed(own, handover, make, crew, missing)) as computed:
            for new in computed:
                rows += new
                if found := self.columns.fault(rows, self.listed.images, start=len(rows) - len(new)):
                    raise UserError(  # not written, so that mixed-up rows cannot spoil those on disk
                        f"the row computed for image {found[0] + 1} of {self.listed.total} {found[1][:300]}; the rows "
                        "before it are kept; please report this"
                    )
                records.append(self.path, new)
                progress(len(rows), self.listed.total)
        if len(rows) != self.listed.total:
            raise UserError(f"{self.path} ends with {len(rows)} rows of {self.listed.total} images; please report this")
        return pd.DataFrame(rows)


def _computed(
    own: Work, handover: Path, make: Make, crew: Crew, batches: Iterable[Batch]
) -> Generator[list[Row], None, None]:
    """Yield the rows of every batch, computed by `own`, or by other processes if there are several. To be closed."""
    if crew.on == RAY:
        try:
            from certify.rows.cluster import by_ray  # importing Ray takes seconds
        except ModuleNotFoundError as error:
            raise UserError(f"on=ray needs {error.name}: pip install 'certizoo[tune]'") from None
        yield from by_ray(handover, make, crew, batches)
    elif (crew.workers or 1) == 1:
        yield from map(own, batches)
    else:
        yield from by_processes(handover, make, crew, batches)


def resume(path: Path, subject: Summary, listed: ImageList, columns: RowSchema, block: int = 1) -> Run:
    """Return the run whose rows are at `path`, new or continued, cut to whole blocks of rows.

    Raises UserError if the folder of `path` holds the rows of another subject, or of other images.
    """
    return Run(path, listed, columns, records.resume(path, subject, listed.images, columns, block))
