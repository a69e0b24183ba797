"""A tracked run as a list of records, each a JSON object; `send` passes one to MLflow.

    {"kind": "start", "experiment", "run_name", "params", "run_id", "key", "time", "uri"}
    {"kind": "metrics", "rows": [[name, value, time, step], ...]}
    {"kind": "artifacts", "folder", "path"}
    {"kind": "finish", "status", "time"}

Times are milliseconds since 1970. Sending a record twice changes nothing: a run is found again by its key, MLflow keeps
equal metric rows once, and files overwrite themselves. So a record whose answer was lost is sent again.
"""

import logging
import random
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certizoo.registry import checks, credentials, store

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)
KEY = "certizoo_key"  # tag of a run that names it before MLflow has given it an id
PENDING = "spool-"  # run ids that MLflow does not know yet: PENDING + key
MAX_NAME, MAX_PARAM = 250, 6000  # MLflow's limits, in characters

Record = dict[str, Any]


def now() -> int:
    return int(time.time() * 1000)


def clean_name(name: str) -> str:
    """Return a metric, parameter or tag name that MLflow accepts."""
    return re.sub(r"[^\w./: -]", "_", name)[:MAX_NAME]


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten `{"train": {"epochs": 3}}` to `{"train.epochs": "3"}`, values cut to MLflow's limit, without secrets."""
    flat: dict[str, str] = {}
    for key, value in credentials.redacted(params).items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            text = str(value)
            flat[clean_name(f"{prefix}{key}")] = text if len(text) <= MAX_PARAM else text[: MAX_PARAM - 3] + "..."
    return flat


def send(client: "MlflowClient", run_id: str | None, record: Record, base: Path) -> str:
    """Send one record of the run `run_id` (None before its start) and return the run's id; folders lie in `base`.

    Raises MLflow's exceptions, and ValueError for artifacts that are missing or lie outside.
    """
    if record["kind"] == "start":
        return open_run(client, record)
    assert run_id is not None, "a run begins with its start record"
    match record["kind"]:
        case "metrics":
            log_rows(client, run_id, record["rows"])
        case "artifacts":
            client.log_artifacts(run_id, str(checks.inside(base, record["folder"])), record["path"])
        case "finish":
            client.set_terminated(run_id, record["status"], record["time"])
    return run_id


def open_run(client: "MlflowClient", record: Record) -> str:
    """Resume the record's run if MLflow knows it, else create it; then log its parameters."""
    experiment = store.experiment_id(client, record["experiment"])
    run_id = find_run(client, experiment, record["run_id"] or PENDING + record["key"])
    if run_id:
        client.update_run(run_id, status="RUNNING")
    else:
        if record["run_id"]:
            logger.warning("MLflow does not know run %s; starting a new one", record["run_id"])
        run_id = create_run(client, experiment, record["key"], record["run_name"], record["time"])
    log_params(client, run_id, record["params"])
    return run_id


def create_run(client: "MlflowClient", experiment: str, key: str, name: str, at: int | None = None) -> str:
    """Return the only run of the key, creating it if needed.

    Two machines may create it at once, and MLflow's client repeats a request whose answer was lost. A writer that finds
    another run besides its own deletes its own and takes the other.
    """
    while True:
        own = client.create_run(experiment, at, {KEY: key}, name).info.run_id
        if _of_key(client, experiment, key) == [own]:
            return own
        client.delete_run(own)
        time.sleep(random.random())  # both may have deleted theirs
        if (found := find_run(client, experiment, PENDING + key)) is not None:
            return found


def find_run(client: "MlflowClient", experiment: str, run_id: str) -> str | None:
    """Return MLflow's id of a run given by that id or as `spool-KEY`; None if MLflow has no such run."""
    from mlflow.exceptions import MlflowException

    if run_id.startswith(PENDING):
        return next(iter(_of_key(client, experiment, run_id.removeprefix(PENDING))), None)
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if store.is_refusal(error):
            return None
        raise
    return run.info.run_id if run.info.lifecycle_stage == "active" else None


def _of_key(client: "MlflowClient", experiment: str, key: str) -> list[str]:
    """Return the runs of a key, in the same order for every writer."""
    found = client.search_runs([experiment], f"tags.{KEY} = '{key}'")
    return sorted(run.info.run_id for run in found)


def log_params(client: "MlflowClient", run_id: str, params: dict[str, str]) -> None:
    """Log parameters. MLflow's never change, so values that differ on a resume become tags `resumed.NAME`."""
    from mlflow.entities import Param, RunTag

    known = client.get_run(run_id).data.params
    new = [Param(key, value) for key, value in params.items() if key not in known]
    changed = [
        RunTag(f"resumed.{key}"[:MAX_NAME], value) for key, value in params.items() if known.get(key, value) != value
    ]
    client.log_batch(run_id, params=new, tags=changed)


def log_rows(client: "MlflowClient", run_id: str, rows: Sequence[Sequence[Any]], model_id: str | None = None) -> None:
    """Log metric rows [name, value, time, step] to a run, and to a logged model if one is given."""
    from mlflow.entities import Metric

    metrics = [Metric(clean_name(name), value, at, step, model_id) for name, value, at, step in rows]
    client.log_batch(run_id, metrics=metrics)
