"""How far a long command is: `progress(done, total)` after every piece of work, and the bar that shows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """The progress that is shown to nobody."""


def counting(progress: Progress, total: int) -> Callable[[], None]:
    """A function that reports 1, 2, ... `total` of it done, call by call."""
    done = iter(range(1, total + 1))
    return lambda: progress(next(done), total)


@contextmanager
def progress_bar(title: str, console: Console) -> Iterator[Progress]:
    """A bar on the terminal while the block runs."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
