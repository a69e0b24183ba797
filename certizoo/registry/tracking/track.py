"""Tracking of one training run. Rank 0 only: one run, one tracker.

The run folder holds everything that MLflow gets (run_folder.py), so a training never fails or hangs because of MLflow:
what could not be sent is sent later, by the tracker or by `certizoo registry sync`.
"""

import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from certizoo import UserError
from certizoo.locks import locked
from certizoo.registry.server import store
from certizoo.registry.tracking import run_folder, runs

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)


class Tracker:
    """A tracker that sends the rows of metrics.jsonl as they are written.

    `flush_seconds` is the least time between two requests. `retry_seconds` is the pause after a request without answer;
    it doubles each time.
    """

    def __init__(
        self, run_dir: Path, experiment: str, run_name: str, uri: str | None = None,
        flush_seconds: float = 5.0, retry_seconds: float = 300.0,
    ) -> None:  # fmt: skip
        self.run_dir, self.experiment, self.run_name = run_dir, experiment, run_name
        self.uri = store.resolve_uri(uri)
        self.run_id: str | None = None  # MLflow's id, once the run is open there
        self._client: MlflowClient | None = None
        self._session, self._alive = 0, ExitStack()
        self._flush_seconds, self._retry_seconds = flush_seconds, retry_seconds
        self._due, self._failures = 0.0, 0

    def start(self) -> None:
        """Begin the run, or continue it after a resume, which has dropped the rows that it will repeat."""
        self._alive.enter_context(locked(self.run_dir / run_folder.TRAINING))
        public = store.public(self.uri)
        self._session = run_folder.begin(self.run_dir, self.experiment, self.run_name, public).session
        self._send()

    def flush(self) -> None:
        """Send new rows if it is time."""
        if time.monotonic() >= self._due:
            self._send()

    def finish(self, status: str = "FINISHED") -> None:
        """End the run: FINISHED, FAILED or KILLED. An absent server is tried once more."""
        try:
            run_folder.update(self.run_dir, self._session, status=status, ended=run_folder.now())
        except (OSError, UserError) as error:  # a full disk is for the checkpoints to report, not for the tracker
            logger.error("the end of the run is not recorded: %s", error)
        self._send()
        self._alive.close()

    def _send(self) -> None:
        try:
            with locked(self.run_dir / run_folder.SENDING, wait=False) as free:
                if free:  # otherwise somebody else is sending
                    self._send_alone()
        except Exception as error:
            self._go_away(error)
        else:
            if self._failures:
                logger.info("MLflow at %s answers again; the run was sent", store.public(self.uri))
            self._due, self._failures = time.monotonic() + self._flush_seconds, 0

    def _send_alone(self) -> None:
        if self._client is None:
            self._client = store.connect(self.uri)
        if self.run_id is None:
            run_id = runs.open_run(self._client, self.run_dir)
            self._client.update_run(run_id, status="RUNNING")
            self.run_id = run_id
        runs.send(self._client, self.run_dir, self.run_id)

    def _go_away(self, error: Exception) -> None:
        if not self._failures:
            why = error if isinstance(error, UserError) else store.trouble(self.uri, error)
            logger.warning("%s; send the run later: `certizoo registry sync %s`", why, self.run_dir)
        self._due = time.monotonic() + self._retry_seconds * 2**self._failures
        self._failures += 1
        self.run_id = None  # opened again, in case that somebody deleted it in MLflow
