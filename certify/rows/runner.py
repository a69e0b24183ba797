"""One resumable run over an image list: rows that are on disk stay, missing ones are computed and appended."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from certify.rows import records
from certify.rows.images import ImageList
from certify.rows.progress import Progress, silent
from certify.rows.records import Row
from certify.rows.summary import Summary
from certify.rows.workers import Work, in_order


@dataclass(frozen=True)
class Run:
    """The rows at `path` so far, those of the first images of `listed`."""

    path: Path
    listed: ImageList
    rows: list[Row]

    def complete(
        self, own: Work, make: Callable[[int], Work], workers: int, device: str, progress: Progress = silent
    ) -> pd.DataFrame:
        """Compute the rows that are missing, write each batch when it is done, and return the table of all.

        own: what turns a batch into its rows in this process; make: what each of several `workers` calls with its
        number to get the same; device: 'cpu' or 'cuda', where they work. `progress` is called after every batch.
        """
        rows = list(self.rows)
        missing = self.listed.batches(skip=len(rows))
        with closing(in_order(own, make, workers, device, missing)) as computed:
            for new in computed:
                records.append(self.path, new)
                rows += new
                progress(len(rows), self.listed.total)
        return pd.DataFrame(rows)


def resume(path: Path, subject: Summary, listed: ImageList, block: int = 1) -> Run:
    """The run whose rows are at `path`, new or where an earlier start of it stopped, cut to whole blocks of rows.

    Raises UserError where the folder of `path` holds the rows of another subject.
    """
    return Run(path, listed, records.resume(path, subject, block))
