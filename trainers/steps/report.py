"""Output of rank 0: a progress bar or plain lines, and `metrics.jsonl`, from which MLflow gets its rows."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from certizoo import UserError
from certizoo.files import write_whole
from certizoo.progress import Pulse
from certizoo.registry.tracking.run_folder import ROWS, now
from certizoo.registry.tracking.system import SystemMetrics
from certizoo.registry.tracking.track import Tracker
from trainers.callbacks import Callbacks

T = TypeVar("T")
MEASURED = (
    "eval_images",
    "certified_images",
)  # keys of an evaluation; TRADES and MART write `clean_acc` elsewhere, too
Row = dict[str, float]


class Report:
    """A report whose methods do nothing unless `enabled`."""

    def __init__(
        self,
        run_dir: Path,
        total_steps: int,
        enabled: bool,
        utilisation: Callable[[float], Row] = lambda images_per_s: {},
        tracker: Tracker | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.path, self.total, self.enabled, self.tracker = run_dir / ROWS, total_steps, enabled, tracker
        self._callbacks, self._utilisation = callbacks or Callbacks(), utilisation
        self.system = SystemMetrics() if tracker else None
        self.console = Console(highlight=False, markup=False)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(),
            console=self.console, disable=not (enabled and self.console.is_terminal),
        )  # fmt: skip
        self._task = self._progress.add_task("training", total=total_steps, note="")
        self._pulse = Pulse()
        self._since, self._waited = (time.monotonic(), 0), 0.0
        self._began = (time.monotonic(), 0)
        self._newest: Row = {}

    @contextmanager
    def shown(self, first_step: int) -> Iterator["Report"]:
        """Open the report; at its end, tell MLflow how the run ended.

        A resumed run first drops the rows that it will repeat: later steps, and the evaluation of `first_step`.
        """
        self._since = self._began = (time.monotonic(), first_step)
        if self.enabled:
            self._drop_rows_after(first_step)
        if self.tracker:
            self.tracker.start()
        status = "FAILED"
        try:
            self._callbacks.begin(first_step)
            with self._progress:
                self._progress.update(self._task, completed=first_step)
                yield self
            status = "FINISHED"
        except (KeyboardInterrupt, SystemExit):  # a SystemExit: a requested stop, or a fault that another rank reports
            status = "KILLED"
            raise
        finally:
            if self.tracker:
                self.tracker.finish(status)
            self._callbacks.end(status)

    def say(self, text: str) -> None:
        """Print a line."""
        if self.enabled:
            self._pulse.printed()
            self.console.print(text, soft_wrap=True, markup=False)

    def alive(self, text: str) -> None:
        """Print a line in a log that has been silent for some seconds."""
        if not self.console.is_terminal and self._pulse.due:
            self.say(text)

    def advance(self, step: int) -> None:
        """Advance the bar."""
        self._progress.update(self._task, completed=step)
        self.alive(f"step {step}/{self.total}  eta {self._left(step)}")

    def awaited(self, batches: Iterator[T]) -> Iterator[T]:
        """Iterate over the batches and measure the time spent waiting for each."""
        while True:
            begun = time.monotonic()
            batch = next(batches, None)
            self._waited += time.monotonic() - begun
            if batch is None:
                return
            yield batch

    def pace(self, step: int, batch_size: int) -> Row:
        """Return images per second and the share of time spent waiting for images, since the last call.

        On a GPU also the highest memory in use so far, and the share of the device's peak (utilisation.py).
        """
        (then, before), now = self._since, time.monotonic()
        passed, waited = max(now - then, 1e-9), self._waited
        self._since, self._waited = (now, step), 0.0
        peak = {"gpu_gb": torch.cuda.max_memory_allocated() / 1e9} if torch.cuda.is_available() else {}
        rate = (step - before) * batch_size / passed
        return {"images_per_s": rate, "loader_wait": min(waited / passed, 1.0), **self._utilisation(rate), **peak}

    def row(self, step: int, epoch: int, metrics: Row) -> None:
        """Report a step: one line of metrics.jsonl, which MLflow gets as well; the bar shows the newest values."""
        self._row(step, epoch, metrics, "on_step", step)

    def evaluation(self, step: int, epoch: int, metrics: Row) -> None:
        """Report the evaluation after an epoch likewise."""
        self._row(step, epoch, metrics, "on_epoch", step, epoch)

    def _row(self, step: int, epoch: int, metrics: Row, event: str, *at: int) -> None:
        if not self.enabled:
            return
        system = self.system.read() if self.system else {}
        self._append(json.dumps({"step": step, "epoch": epoch, "time": now(), **metrics, **system}) + "\n")
        self._callbacks.tell(event, *at, {**metrics, **system})
        if self.tracker:
            self.tracker.flush()
        self._newest |= metrics
        self._progress.update(self._task, note=f"epoch {epoch + 1}  {_listed(self._newest)}")
        if not self.console.is_terminal or any(key in metrics for key in MEASURED):
            self.say(f"step {step}/{self.total}  epoch {epoch + 1}  {_listed(metrics)}  eta {self._left(step)}")

    def _append(self, line: str) -> None:
        try:
            with self.path.open("a") as file:
                file.write(line)
        except OSError as error:
            raise UserError(
                f"{self.path} could not be written ({error.strerror}); free some space, then repeat the command with "
                "resume=auto"
            ) from None

    def _left(self, step: int) -> timedelta:
        """Return the time left at the pace since the run started or was resumed."""
        then, first = self._began
        pace = (time.monotonic() - then) / max(step - first, 1)
        return timedelta(seconds=round(pace * (self.total - step)))

    def _drop_rows_after(self, step: int) -> None:
        """Cut the file before the first row that is repeated. Rows are written in the order of their steps.

        The evaluation at this step is repeated; it comes after the step's other row.
        """
        if not self.path.exists():
            return
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = takewhile(lambda line: (_step_of(line), _is_evaluation(line)) <= (step, False), lines)
        write_whole(self.path, b"".join(kept).decode())


def _listed(metrics: Row) -> str:
    """Return the values that people read; those of a family, such as class_clean_acc/3, are for the files."""
    return "  ".join(f"{key} {value:.4g}" for key, value in metrics.items() if "/" not in key)


def _is_evaluation(line: bytes) -> bool:
    """Return whether a row holds measurements on test images."""
    return any(f'"{key}"'.encode() in line for key in MEASURED)


def _step_of(line: bytes) -> float:
    """Return the step of a row; infinite for a line that a kill cut off or that is not a row."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return float("inf")
