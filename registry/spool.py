"""What could not be sent to MLflow, kept in the run folder until `python -m registry sync` sends it.

`mlflow_spool.jsonl` holds one record a line (see `records.py`) and begins with a start record;
`mlflow_spool.state.json` says what was already sent. Records that MLflow refuses go to
`mlflow_refused.jsonl`, so that one bad row does not hold up the others.
"""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from certizoo import UserError
from registry import records, store

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)
SPOOL, STATE, REFUSED = "mlflow_spool.jsonl", "mlflow_spool.state.json", "mlflow_refused.jsonl"


class State(TypedDict):
    """What was sent: up to byte `offset` of the spool, into the run `run_id`, at `uri`."""

    run_id: str | None
    offset: int
    uri: str | None


def append(run_dir: Path, record: records.Record, file: str = SPOOL) -> None:
    """Add one record. A line torn by a crash is ended first, so that it spoils no other."""
    line = json.dumps(record).encode() + b"\n"
    with store.locked(run_dir), (run_dir / file).open("ab+") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            line = line if stream.read(1) == b"\n" else b"\n" + line
        stream.write(line)


def waiting(run_dir: Path) -> bool:
    return (run_dir / SPOOL).is_file()


def sync(run_dir: Path, uri: str | None = None) -> str | None:
    """Send the spool of a run folder in order; returns MLflow's id of its run (None if it never had a spool).

    May be interrupted and run again: no row is doubled. Raises `store.Away` if MLflow still does not answer.
    """
    state = _load_state(run_dir)
    if not waiting(run_dir):
        return state["run_id"]
    target = store.recorded_uri(uri, _recorded(run_dir) or state["uri"] or store.public(store.resolve_uri()))
    state["uri"] = store.public(target)
    record: records.Record = {}
    store.use_defaults()
    with store.one_line(target):
        client = store.connect(target)
        for record, end in _read(run_dir, state["offset"]):
            state["run_id"] = _send(client, state["run_id"], record, run_dir)
            state["offset"] = end
            _save_state(run_dir, state)
    _remove(run_dir, state, finished=record.get("kind") == "finish")
    return state["run_id"]


def refuse(run_dir: Path, record: records.Record, error: Exception) -> None:
    """Set aside a record that MLflow will never take."""
    append(run_dir, record, REFUSED)
    logger.warning("MLflow refused a record, kept in %s: %s", run_dir / REFUSED, store.reason(error))


def _send(client: "MlflowClient", run_id: str | None, record: records.Record, run_dir: Path) -> str:
    from mlflow.exceptions import MlflowException

    if run_id is None and record["kind"] != "start":
        raise UserError(f"{run_dir / SPOOL} does not begin with a start record; delete it or restore its head")
    try:
        return records.send(client, run_id, record, run_dir)
    except (MlflowException, FileNotFoundError) as error:
        if run_id is None or record["kind"] == "start" or not store.is_refusal(error):
            raise
        refuse(run_dir, record, error)
        return run_id


def _read(run_dir: Path, offset: int) -> Iterator[tuple[records.Record, int]]:
    """Records from a byte offset on, each with the offset behind it. Lines torn by a crash are passed over."""
    with (run_dir / SPOOL).open("rb") as stream:
        stream.seek(offset)
        for line in stream:
            offset += len(line)
            try:
                yield json.loads(line), offset
            except ValueError:
                logger.warning("%s: passed over a torn line that ends at byte %d", run_dir / SPOOL, offset)


def _recorded(run_dir: Path) -> str | None:
    """The URI in the first start record."""
    return next((record["uri"] for record, _ in _read(run_dir, 0) if record["kind"] == "start"), None)


def _load_state(run_dir: Path) -> State:
    try:
        state: State = json.loads((run_dir / STATE).read_text())
        return state
    except FileNotFoundError:
        return State(run_id=None, offset=0, uri=None)


def _save_state(run_dir: Path, state: State) -> None:
    fresh = run_dir / f"{STATE}.tmp"
    fresh.write_text(json.dumps(state))
    fresh.replace(run_dir / STATE)


def _remove(run_dir: Path, state: State, *, finished: bool) -> None:
    """Delete a spool that was sent to its end. The state stays while the run may still add to it."""
    with store.locked(run_dir):
        if (run_dir / SPOOL).stat().st_size > state["offset"]:
            return
        (run_dir / SPOOL).unlink()
        if finished:
            (run_dir / STATE).unlink(missing_ok=True)
        else:
            _save_state(run_dir, State(run_id=state["run_id"], offset=0, uri=state["uri"]))
