"""The display of a running search: one line per trial, in a live table, or as plain lines in a log."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from certizoo.progress import Pulse
from tuning.spaces import Space

ENDED = ("certified", "stopped early", "failed")
SHOWN = 30
COLOURS = {"certified": "green", "failed": "red", "running": "cyan"}


@dataclass
class Line:
    """The state of a trial. `figures`: the numbers of its last report."""

    state: str = "waiting"
    values: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    why: str = ""


class Board:
    """Display every event of the search. A context manager: live on a terminal, lines otherwise."""

    def __init__(self, space: Space, metric: Sequence[str], total: int, epochs: int) -> None:
        self.space, self.metric, self.total, self.epochs = space, metric, total, epochs
        self.lines: dict[str, Line] = {}
        self.console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
        self._pulse = Pulse()
        self._live = Live(get_renderable=self.table, console=self.console, refresh_per_second=2)

    def __enter__(self) -> "Board":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def started(self, trial: str, point: Mapping[str, Any]) -> None:
        line = self._line(trial, point)
        line.state = "running"

    def reported(self, trial: str, point: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
        line = self._line(trial, point)
        line.figures = dict(figures)
        line.seconds = float(figures.get("time_total_s") or 0)

    def ended(self, trial: str) -> None:
        """Mark a trial as finished, with a certificate, or as stopped by the scheduler."""
        line = self.lines[trial]
        before, line.state, line.why = line.state, "certified" if line.figures.get("certified") else "stopped early", ""
        if before == "running":
            self._say(trial)

    def restarting(self, trial: str, point: Mapping[str, Any], why: str) -> None:
        """Record a restart after the loss of a worker, even of one that had not begun."""
        line = self._line(trial, point)
        line.state, before, line.why = "restarting", line.why, why
        if why != before:
            self._say(trial)

    def failed(self, trial: str, point: Mapping[str, Any], why: str) -> None:
        line = self._line(trial, point)
        line.state, line.why = "failed", why
        self._say(trial)

    def count(self, state: str) -> int:
        return sum(line.state == state for line in self.lines.values())

    @property
    def ended_trials(self) -> int:
        return sum(self.count(state) for state in ENDED)

    def waiting(self, why: str) -> None:
        """Report that no trial has run for a while."""
        self._print(f"no trial runs: {why}")

    def alive(self) -> None:
        """Print a line in a log that has been silent for some seconds."""
        if not self.console.is_terminal and self._pulse.due:
            text = f"{self.ended_trials} of {self.total} trials ended, {self.count('running')} running"
            self._print(text + self._best())

    def _best(self) -> str:
        """Return the best trial's figure in words; that of a few images counts only while there is no certificate."""
        key = self.metric[0]
        best = max(self.lines.values(), key=lambda line: _rank(line, key), default=None)
        if best is None or key not in best.figures:
            return ""
        return f"; best {key} {float(best.figures[key]):.1%}" + ", on a few images" * (best.state != "certified")

    def _print(self, text: str) -> None:
        self._pulse.printed()
        self.console.print(text, soft_wrap=True, markup=False)

    def table(self) -> Table:
        """Return the SHOWN best trials, those with a certificate before those with an estimate.

        The terminal draws every row twice a second, and shows no more.
        """
        title = f"{self.space.name}: {self.ended_trials} of {self.total} trials"
        if len(self.lines) > SHOWN:
            title += f", {self.count('running')} running; the {SHOWN} best"
        table = Table(title=title)
        for column in ("trial", "state", "epoch", *(key.split(".", 1)[-1] for key in self.space.parameters)):
            table.add_column(column)
        for column in (*self.shown, "s"):
            table.add_column(column, justify="right")
        for trial, line in nlargest(SHOWN, self.lines.items(), key=lambda item: _rank(item[1], self.metric[0])):
            table.add_row(*self._cells(trial, line))
        return table

    @property
    def shown(self) -> list[str]:
        """Return the columns: objectives, attacked accuracy at their radii, and clean accuracy.

        While a trial trains, the figures come from the few images that the trainer certifies and from its monitor.
        """
        return list(dict.fromkeys([*self.metric, "clean_acc"]))

    def _cells(self, trial: str, line: Line) -> list[str | Text]:
        state = Text(line.state, COLOURS.get(line.state, ""))
        epoch = f"{line.figures.get('epoch', 0):g}/{self.epochs}"
        values = [f"{line.values[key]:.3g}" if isinstance(line.values[key], float) else str(line.values[key])
                  for key in self.space.parameters]  # fmt: skip
        figures = [f"{line.figures[key]:.1%}" if key in line.figures else "" for key in self.shown]
        return [trial.rsplit("_", 1)[-1], state, epoch, *values, *figures, f"{line.seconds:.0f}"]

    def _line(self, trial: str, point: Mapping[str, Any]) -> Line:
        line = self.lines.setdefault(trial, Line())
        line.values = self.space.values(dict(point))
        return line

    def _say(self, trial: str) -> None:
        """Log how a trial ended, or why it failed."""
        line = self.lines[trial]
        values = " ".join(f"{key}={value}" for key, value in line.values.items())
        figures = " ".join(f"{key} {line.figures[key]:.1%}" for key in self.shown if key in line.figures)
        text = line.why or figures
        if line.why or not self.console.is_terminal:
            self._print(f"trial {trial} {line.state}: {text} ({values})")


def _rank(line: Line, metric: str) -> tuple[bool, float]:
    return line.state == "certified", float(line.figures.get(metric, -1))


def failures(board: Board, log_folder: Path) -> list[str]:
    """Return one line for each failed trial."""
    failed = [(trial, line.why) for trial, line in board.lines.items() if line.state == "failed"]
    return [f"trial {trial} failed: {why}; see its logs in {log_folder / trial}" for trial, why in failed]
