"""Progress of long commands: `progress(done, total)` after every piece of work, shown as a bar or as plain lines.

A log that is not a terminal gets a line every LINE_SECONDS; `Pulse` is for commands that print other lines too.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

Progress = Callable[[int, int], None]
LINE_SECONDS = 10.0  # at most one line in so many seconds


def silent(done: int, total: int) -> None:
    """Ignore the progress."""


def counting(progress: Progress, total: int) -> Callable[[], None]:
    """Return a function that reports 1, 2, ... `total` pieces done, one more at each call."""
    done = iter(range(1, total + 1))
    return lambda: progress(next(done), total)


class Pulse:
    """Tells whether a log has been silent for LINE_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.printed()

    def printed(self) -> None:
        """Note that a line was printed."""
        self._last = self._clock()

    @property
    def due(self) -> bool:
        """Return True if a line is due."""
        return self._clock() - self._last >= LINE_SECONDS


@contextmanager
def progress_bar(title: str, console: Console) -> Iterator[Progress]:
    """Show progress while the block runs: a bar on a terminal, lines in a file or pipe."""
    if not console.is_terminal:
        yield progress_lines(title, console)
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def progress_lines(title: str, console: Console, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Return a progress that prints "certifying 20/100, 2.00/s, 40 s left", at most every LINE_SECONDS.

    The first report is printed at once, since a batch may take minutes. The rate and the time left count from it, so
    that rows of an earlier run do not enter them.
    """
    first: tuple[float, int] | None = None
    printed = 0.0

    def report(done: int, total: int) -> None:
        nonlocal first, printed
        now = clock()
        if first and now - printed < LINE_SECONDS:
            return
        first, printed = first or (now, done), now
        seconds, pieces = now - first[0], done - first[1]
        line = f"{title} {done}/{total}"
        if seconds > 0 and pieces > 0:
            rate = pieces / seconds
            line += f", {rate:.3g}/s, {(total - done) / rate:.0f} s left"
        console.print(line, markup=False, soft_wrap=True)

    return report
