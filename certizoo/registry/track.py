"""Tracking of one training run. Rank 0 only: one run, one tracker.

Training never fails or hangs because of MLflow: records that cannot be sent are spooled in the run folder, in order.
"""

import logging
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certizoo.registry import records, spool, store

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)


class Tracker:
    """A tracker that sends a run's parameters, metrics and files to MLflow, or spools them in `run_dir`.

    `flush_seconds` is the age at which batched metrics are sent. `retry_seconds` is the first pause before a server
    that did not answer is tried again; it doubles each time.
    """

    def __init__(
        self, run_dir: Path, uri: str | None = None, flush_seconds: float = 5.0, retry_seconds: float = 300.0
    ) -> None:
        self.run_dir = Path(run_dir)
        self.uri = store.resolve_uri(uri)
        self.run_id: str | None = None  # MLflow's id, or `spool-KEY` while MLflow has not seen the run
        self._client: MlflowClient | None = None
        self._start: records.Record = {}
        self._rows: list[list[Any]] = []
        self._flushed = time.monotonic()
        self._flush_seconds = flush_seconds
        self._pause = retry_seconds
        self._retry_at: float | None = None  # None while MLflow answers

    def start(self, experiment: str, run_name: str, params: Mapping[str, Any], run_id: str | None = None) -> str:
        """Begin a run, or resume `run_id` (as returned by an earlier start; keep it in the checkpoint).

        Returns the run's id. `params` may be nested: names are joined by dots.
        """
        self.run_dir.mkdir(parents=True, exist_ok=True)
        pending = run_id is not None and run_id.startswith(records.PENDING)
        key = run_id.removeprefix(records.PENDING) if run_id and pending else uuid.uuid4().hex
        self._start = {
            "kind": "start",
            "experiment": experiment,
            "run_name": run_name,
            "params": records.flatten(params),
            "run_id": None if pending else run_id,
            "key": key,
            "time": records.now(),
            "uri": store.public(self.uri),
        }
        self.run_id = run_id or records.PENDING + key
        if spool.waiting(self.run_dir):  # of an earlier session: it is sent first
            self._go_away(Exception("an earlier session's spool waits"), quiet=True)
            self._come_back()
        self._put(self._start)
        return self.run_id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of a step; they are sent in batches."""
        at = records.now()
        self._rows += [[name, float(value), at, int(step)] for name, value in metrics.items()]
        if time.monotonic() - self._flushed >= self._flush_seconds:
            self.flush()

    def log_artifacts(self, folder: Path, path: str | None = None) -> None:
        """Send the files of a folder in the run folder, below `path` in the run's artifacts.

        The folder must stay until it is sent.
        """
        shown = os.path.relpath(Path(folder).resolve(), self.run_dir.resolve())
        self._put({"kind": "artifacts", "folder": shown, "path": path})

    def flush(self) -> None:
        """Send the metrics recorded so far."""
        rows, self._rows, self._flushed = self._rows, [], time.monotonic()
        if rows:
            self._put({"kind": "metrics", "rows": rows})

    def finish(self, status: str = "FINISHED") -> None:
        """End the run: FINISHED, FAILED or KILLED. A spool is tried once more."""
        self.flush()
        self._put({"kind": "finish", "status": status, "time": records.now()})
        if self._retry_at is not None:
            self._come_back()

    def _put(self, record: records.Record) -> None:
        """Send a record, or spool it: after a spooled record all later ones wait too."""
        if self._retry_at is not None and time.monotonic() >= self._retry_at:
            self._come_back()
        if self._retry_at is None:
            try:
                self._send(record)
                return
            except Exception as error:
                if record["kind"] != "start" and store.is_refusal(error):
                    spool.refuse(self.run_dir, record, error)
                    return
                self._go_away(error, quiet=False)
                if record["kind"] != "start":
                    self._keep(self._resume_record())
        self._keep(record)

    def _send(self, record: records.Record) -> None:
        if self._client is None:
            self._client = store.connect(self.uri)
        self.run_id = records.send(self._client, self.run_id, record, self.run_dir)

    def _keep(self, record: records.Record) -> None:
        try:
            spool.append(self.run_dir, record)
        except OSError as error:  # a full disk is for the checkpoints to report, not for the tracker
            logger.error("a tracking record is lost: %s", error)

    def _resume_record(self) -> records.Record:
        """Return the first record of a spool that begins in the middle of a run."""
        return self._start | {"run_id": self.run_id, "params": {}}

    def _go_away(self, error: Exception, *, quiet: bool) -> None:
        self._retry_at = time.monotonic() + self._pause
        if not quiet:
            logger.warning(
                "%s; the run is kept in %s; send it with `certizoo registry sync %s`",
                store.trouble(self.uri, error),
                self.run_dir / spool.SPOOL,
                self.run_dir,
            )

    def _come_back(self) -> None:
        """Try to send the spool; send directly again if that worked."""
        try:
            self.run_id = spool.sync(self.run_dir, self.uri, wait=False) or self.run_id
            self._retry_at = None
            logger.info("MLflow at %s answers again; the spool was sent", store.public(self.uri))
        except Exception as error:
            self._pause *= 2
            self._retry_at = time.monotonic() + self._pause
            logger.info("MLflow still does not answer: %s", store.reason(error))
