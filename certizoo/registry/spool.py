"""Records that could not be sent to MLflow, kept in the run folder until `certizoo registry sync` sends them.

`mlflow_spool.jsonl` holds one record per line (see `records.py`) and begins with a start record;
`mlflow_spool.state.json` states what was already sent. Records that MLflow refuses, and lines that are not records, go
to `mlflow_refused.jsonl`, so that one bad row does not block the others.

A run folder may come from someone else. Its spool is sent to the server of the person who sends it, whatever server it
names, and nothing outside the run folder is sent. One process sends a spool at a time.
"""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from certizoo import UserError
from certizoo.files import no_link, write_whole
from certizoo.locks import locked
from certizoo.registry import checks, records, store
from certizoo.text import plain

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)
SPOOL, STATE, REFUSED = "mlflow_spool.jsonl", "mlflow_spool.state.json", "mlflow_refused.jsonl"
LOCK = ".mlflow_spool.lock"
MAX_LINE = 2**22  # bytes; a start record with a thousand parameters is half as long
KEPT = 2000  # characters of a line that is not a record


class State(TypedDict):
    """The progress of sending: up to byte `offset` of the spool, into the run `run_id`, at `uri`."""

    run_id: str | None
    offset: int
    uri: str | None


def append(run_dir: Path, record: records.Record, file: str = SPOOL) -> None:
    """Add one record. A line torn by a crash is ended first, so that it damages no other."""
    line = json.dumps(record).encode() + b"\n"
    with store.locked(run_dir), open(run_dir / file, "ab+", opener=no_link) as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            line = line if stream.read(1) == b"\n" else b"\n" + line
        stream.write(line)


def waiting(run_dir: Path) -> bool:
    return (run_dir / SPOOL).is_file()


def meant_for(run_dir: Path) -> str | None:
    """Return the server that the spool names, to be shown and compared."""
    for line, _ in _lines(run_dir, 0) if waiting(run_dir) else ():
        record = _parsed(line)
        if isinstance(record, dict) and record.get("kind") == "start":
            return plain(store.public(str(record.get("uri") or "")))[:200] or None
    return None


def sync(run_dir: Path, uri: str | None = None, *, wait: bool = True) -> str | None:
    """Send the spool of a run folder in order; return MLflow's id of its run (None if it never had a spool).

    May be interrupted and run again: no row is doubled.

    Raises:
        store.Away: MLflow still does not answer.
        UserError: the spool is for another server than this person's (give `uri`), or is being sent and `wait` is
            False.
    """
    refuse_links(run_dir, SPOOL, STATE, f"{STATE}.part", REFUSED)
    if not waiting(run_dir):
        return _load_state(run_dir)["run_id"]
    target = store.agreed_uri(uri, meant_for(run_dir), run_dir)
    with locked(run_dir / LOCK, wait=wait) as free:
        if not free:
            raise UserError(f"{run_dir}: another process sends its spool; wait for it")
        state = _load_state(run_dir)
        return _send_all(run_dir, state, target) if waiting(run_dir) else state["run_id"]


def refuse(run_dir: Path, record: records.Record, error: Exception) -> None:
    """Set aside a record that MLflow will never accept."""
    append(run_dir, record, REFUSED)
    logger.warning("MLflow refused a record, set aside in %s: %s", run_dir / REFUSED, plain(store.reason(error)))


def refuse_links(run_dir: Path, *names: str) -> None:
    """Refuse links in place of our files: writing through them could write anywhere."""
    for name in names:
        if (run_dir / name).is_symlink():
            raise UserError(f"{run_dir / name} is a link; remove it")


def _send_all(run_dir: Path, state: State, target: str) -> str | None:
    state["uri"] = store.public(target)
    if state["offset"] > (run_dir / SPOOL).stat().st_size:
        state["offset"] = 0
    record: records.Record = {}
    store.use_defaults()
    with store.one_line(target):
        client = store.connect(target)
        for line, end in _lines(run_dir, state["offset"]):
            if (found := _record(run_dir, line)) is not None:
                record = found
                state["run_id"] = _send(client, state["run_id"], record, run_dir)
            state["offset"] = end
            write_whole(run_dir / STATE, json.dumps(state))
    _remove(run_dir, state, finished=record.get("kind") == "finish")
    return state["run_id"]


def _send(client: "MlflowClient", run_id: str | None, record: records.Record, run_dir: Path) -> str:
    from mlflow.exceptions import MlflowException

    if run_id is None and record["kind"] != "start":
        raise UserError(f"{run_dir / SPOOL} does not begin with a start record; delete it or restore its head")
    try:
        return records.send(client, run_id, record, run_dir)
    except (MlflowException, FileNotFoundError, ValueError) as error:
        if run_id is None or record["kind"] == "start" or not store.is_refusal(error):
            raise
        refuse(run_dir, record, error)
        return run_id


def _record(run_dir: Path, line: bytes) -> records.Record | None:
    """Return the record of a line; set the line aside and return None if it is not a record."""
    try:
        if len(line) > MAX_LINE:
            raise ValueError(f"longer than {MAX_LINE} bytes")
        found: Any = _parsed(line)
        checks.record(found)
    except ValueError as error:
        append(run_dir, {"why": str(error), "line": line[:KEPT].decode("utf-8", "replace")}, REFUSED)
        logger.warning("%s: a line is not a record (%s), set aside in %s", run_dir / SPOOL, plain(str(error)), REFUSED)
        return None
    return dict(found)


def _parsed(line: bytes) -> Any:
    """Parse a line; return None if it is not JSON, such as a line torn by a crash."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _lines(run_dir: Path, offset: int) -> Iterator[tuple[bytes, int]]:
    """Iterate over lines from a byte offset on, each with the offset after it; a line over MAX_LINE is cut."""
    with open(run_dir / SPOOL, "rb", opener=no_link) as stream:
        stream.seek(offset)
        while line := stream.readline(MAX_LINE + 1):
            rest = line
            while len(rest) > MAX_LINE and not rest.endswith(b"\n"):
                rest = stream.readline(MAX_LINE + 1)
            yield line, stream.tell()


def _load_state(run_dir: Path) -> State:
    """Read the state; an invalid file counts as nothing sent, which doubles nothing."""
    try:
        state = json.loads((run_dir / STATE).read_text())
        checks.run_id(state["run_id"])
        if isinstance(state["offset"], int) and state["offset"] >= 0:
            return State(run_id=state["run_id"], offset=state["offset"], uri=None)
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return State(run_id=None, offset=0, uri=None)


def _remove(run_dir: Path, state: State, *, finished: bool) -> None:
    """Delete a spool that was sent completely. The state stays while the run may still add to it."""
    with store.locked(run_dir):
        if (run_dir / SPOOL).stat().st_size > state["offset"]:
            return
        (run_dir / SPOOL).unlink()
        if finished:
            (run_dir / STATE).unlink(missing_ok=True)
        else:
            write_whole(run_dir / STATE, json.dumps(State(run_id=state["run_id"], offset=0, uri=state["uri"])))
