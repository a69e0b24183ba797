"""Callbacks by name: classes that hear what a training reports, `train.callbacks=[NAME]` (docs/howto/my_package.md).

Only rank 0 has them, and they get numbers and no model: so they cannot make ranks wait for each other or change the
weights, and a resumed run may have others. A package adds its own to CALLBACKS (certizoo/plugins.py).
"""

import logging
from collections.abc import Callable, Mapping
from operator import methodcaller
from typing import Any

from certizoo import UserError

log = logging.getLogger(__name__)
Metrics = Mapping[str, float]


class Callback:
    """Does nothing; a subclass has the methods that it needs. An exception in one ends the run in one line.

    Args:
        job: the run, trainers.job.job.Job: `job.config` is its configuration, `job.run_dir` its folder.
        first_step: the steps done before: 0, or those of the checkpoint that a resumed run continues.
    """

    def __init__(self, job: Any, first_step: int) -> None:
        self.job, self.first_step = job, first_step

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Hear a row of training, every train.log_every steps: loss terms, lr, images_per_s."""

    def on_epoch(self, step: int, epoch: int, metrics: Metrics) -> None:
        """Hear the evaluation after an epoch (from 0): clean_acc, pgd_acc."""

    def on_end(self, status: str) -> None:
        """Hear how the run ended: FINISHED, FAILED or KILLED."""


Make = Callable[[Any, int], Callback]
CALLBACKS: dict[str, Make] = {}


class Callbacks:
    """Callbacks in the order of the configuration. `made`: {key: a function (job, first_step) -> callback}."""

    def __init__(self, job: Any = None, made: Mapping[str, Make] | None = None) -> None:
        self._job, self._made = job, made or {}
        self._open: dict[str, Callback] = {}

    def begin(self, first_step: int) -> None:
        """Make them all. Raises UserError naming one that cannot be made."""
        for key, make in self._made.items():
            self._open[key] = self._called(key, make, self._job, first_step)

    def tell(self, event: str, *values: object) -> None:
        """Call this method of all. Raises UserError naming the first that fails."""
        for key, callback in self._open.items():
            self._called(key, methodcaller(event, *values), callback)

    def end(self, status: str) -> None:
        """Tell all of them how the run ended, even if some fail. Their errors count only for a run without its own."""
        errors = []
        for key, callback in self._open.items():
            try:
                self._called(key, methodcaller("on_end", status), callback)
            except UserError as error:
                errors.append(error)
        if errors and status == "FINISHED":
            raise errors[0]

    def _called(self, key: str, work: Callable[..., Any], *values: object) -> Any:
        try:
            return work(*values)
        except UserError as error:
            raise UserError(f"{key}: {error}") from None
        except Exception as error:
            log.info("%s", key, exc_info=True)  # in the log of the rank
            words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise UserError(f"{key}: {words}; repair it or leave it out, then resume=auto") from None
