"""What rank 0 shows and keeps: a progress bar or plain lines, `metrics.jsonl`, MLflow. Other ranks are silent."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from certizoo.files import write_whole
from registry.track import Tracker

Row = dict[str, float]
ROWS = "metrics.jsonl"


class Report:
    """Every method does nothing unless `speaks`."""

    def __init__(self, run_dir: Path, total_steps: int, speaks: bool, tracker: Tracker | None = None) -> None:
        self.path, self.total, self.speaks, self.tracker = run_dir / ROWS, total_steps, speaks, tracker
        self.console = Console(highlight=False)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(),
            console=self.console, disable=not (speaks and self.console.is_terminal),
        )  # fmt: skip
        self._task = self._progress.add_task("training", total=total_steps, note="")
        self._since = (time.monotonic(), 0)

    @contextmanager
    def shown(self, first_step: int) -> Iterator["Report"]:
        """Rows of steps that a resumed run makes again are dropped; MLflow hears how the run ended."""
        self._since = (time.monotonic(), first_step)
        if self.speaks:
            self._drop_rows_after(first_step)
        status = "FAILED"
        try:
            with self._progress:
                self._progress.update(self._task, completed=first_step)
                yield self
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            if self.tracker:
                self.tracker.finish(status)

    def say(self, text: str) -> None:
        """A line for the person."""
        if self.speaks:
            self.console.print(text, soft_wrap=True, markup=False)

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step)

    def images_per_second(self, step: int, batch_size: int) -> float:
        """Since it was asked last."""
        (then, before), now = self._since, time.monotonic()
        self._since = (now, step)
        return (step - before) * batch_size / max(now - then, 1e-9)

    def row(self, step: int, epoch: int, metrics: Row) -> None:
        """One line of metrics.jsonl, one point of every curve."""
        if not self.speaks:
            return
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, "epoch": epoch, **metrics}) + "\n")
        if self.tracker:
            self.tracker.log(metrics, step)
        note = "  ".join(f"{key} {value:.4g}" for key, value in metrics.items())
        self._progress.update(self._task, note=note)
        if not self.console.is_terminal or "clean_acc" in metrics:
            self.say(f"step {step}/{self.total}  epoch {epoch + 1}  {note}")

    def _drop_rows_after(self, step: int) -> None:
        if not self.path.exists():
            return
        kept = [line for line in self.path.read_text().splitlines() if _step_of(line) <= step]
        write_whole(self.path, "".join(line + "\n" for line in kept))


def _step_of(line: str) -> float:
    """A line cut off by a kill counts as the future."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")
