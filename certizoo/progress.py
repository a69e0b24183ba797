"""Progress of long commands: `progress(done, total)` after every piece of work, shown as a bar or as plain lines.

A log that is not a terminal gets a line every LINE_SECONDS, and one every WAIT_SECONDS while a piece takes longer.
`Pulse` is for commands that print other lines too.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

Progress = Callable[[int, int], None]
LINE_SECONDS = 10.0  # at most one line in so many seconds
WAIT_SECONDS = 60.0  # at least one line in so many seconds


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
        with _lines_meanwhile(title, console) as progress:
            yield progress
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class ProgressLines:
    """A progress that prints "certifying 20/100, 2.00/s, 40 s left", at most every LINE_SECONDS.

    The first report is printed at once, since a batch may take minutes. The rate and the time left count from it, so
    that rows of an earlier run do not enter them.
    """

    def __init__(self, title: str, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._title, self._console, self._clock = title, console, clock
        self._first: tuple[float, int] | None = None
        self._last, self._printed, self._count = 0.0, 0.0, ""

    def __call__(self, done: int, total: int) -> None:
        self._last, self._count = self._clock(), f"{self._title} {done}/{total}"
        if self._first and self._last - self._printed < LINE_SECONDS:
            return
        self._first = self._first or (self._last, done)
        seconds, pieces = self._last - self._first[0], done - self._first[1]
        rate = pieces / seconds if seconds > 0 else 0.0
        self._print(f"{self._count}, {rate:.3g}/s, {(total - done) / rate:.0f} s left" if rate else self._count)

    def wait(self) -> None:
        """Print "certifying 20/100, 60 s at work on the next" if nothing was printed for WAIT_SECONDS."""
        now = self._clock()
        if self._first and now - self._printed >= WAIT_SECONDS:
            self._print(f"{self._count}, {now - self._last:.0f} s at work on the next")

    def _print(self, line: str) -> None:
        self._printed = self._clock()
        self._console.print(line, markup=False, soft_wrap=True)


@contextmanager
def _lines_meanwhile(title: str, console: Console) -> Iterator[ProgressLines]:
    """Yield a progress whose lines a thread adds to while a piece takes long."""
    lines, ended = ProgressLines(title, console), threading.Event()

    def wait() -> None:
        while not ended.wait(WAIT_SECONDS):
            lines.wait()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        ended.set()
        thread.join()
