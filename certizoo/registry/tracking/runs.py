"""Send a tracked run from its folder to MLflow. Sending again changes nothing, so an interrupted sync is repeated.

A run is found again by its id or key, MLflow keeps equal metrics once, and files overwrite themselves. A run folder may
come from someone else: it is sent to the server of the person who sends it, whatever server it names, and nothing
outside the folder is sent. One process sends a run at a time.
"""

import logging
import random
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certizoo import UserError
from certizoo.documents import read_yaml
from certizoo.locks import locked
from certizoo.registry.server import credentials, store
from certizoo.registry.tracking import checks, run_folder
from certizoo.registry.tracking.run_folder import Point, Tracked
from certizoo.text import plain

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)
KEY = "certizoo_key"  # tag: Tracked.key
MAX_NAME, MAX_PARAM = 250, 6000  # MLflow's limits, in characters
MAX_PARAMS = 2000


def waiting(run_dir: Path) -> Tracked | None:
    """Return the state of a run that has not ended, or of which MLflow lacks something."""
    state = run_folder.load(run_dir)
    return None if state is None or state.done else state


def sync(run_dir: Path, uri: str | None = None) -> str | None:
    """Send what MLflow lacks of a run; return MLflow's id of it, None if the folder is not of a tracked run.

    Raises:
        store.Away: MLflow does not answer.
        UserError: the run is meant for another server than this person's; give `uri`.
    """
    state = run_folder.load(run_dir)
    if state is None:
        return None
    target = store.agreed_uri(uri, state.uri, run_dir)
    store.use_defaults()
    with store.one_line(target), locked(run_dir / run_folder.SENDING):
        client = store.connect(target)
        run_id = open_run(client, run_dir)
        send(client, run_dir, run_id)
    return run_id


def open_run(client: "MlflowClient", run_dir: Path) -> str:
    """Return MLflow's id of the run, which is created if MLflow does not know it; log its parameters."""
    state = run_folder.load(run_dir)
    assert state is not None
    params = _params(run_dir / run_folder.CONFIG)
    experiment = store.experiment_id(client, state.experiment)
    run_id = _active(client, state.run_id) or create_run(client, experiment, state.key, state.run_name, state.began)
    if run_id != state.run_id:  # this server has not seen the rows either
        run_folder.update(run_dir, state.session, run_id=run_id, sent=0)
    _log_params(client, run_id, params)
    return run_id


def send(client: "MlflowClient", run_dir: Path, run_id: str) -> None:
    """Send the rows that MLflow lacks to the opened run and, if the session has ended, files and status.

    A session that neither runs nor has said how it ended was killed. The caller holds the folder's lock SENDING.
    """
    killed = not run_folder.is_training(run_dir)
    state = run_folder.load(run_dir)  # the last rows are older than the end, so none is missed below
    assert state is not None
    for points, end in run_folder.batches(run_dir, state):
        log_points(client, run_id, points)
        if not run_folder.update(run_dir, state.session, sent=end):
            return  # resumed meanwhile: the rest is for its next sender
    if state.status or killed:
        _end(client, run_id, run_dir, state)


def create_run(client: "MlflowClient", experiment: str, key: str, name: str, at: int | None = None) -> str:
    """Return the only run of the key, creating it if needed.

    Two machines may create it at once, and MLflow's client repeats a request whose answer was lost. A writer that finds
    another run besides its own deletes its own and takes the other.
    """
    while True:
        if found := _of_key(client, experiment, key):
            return found[0]
        own = client.create_run(experiment, at, {KEY: key}, name).info.run_id
        if _of_key(client, experiment, key) == [own]:
            return own
        client.delete_run(own)
        time.sleep(random.random())  # both may have deleted theirs


def log_points(client: "MlflowClient", run_id: str, points: Sequence[Point], model_id: str | None = None) -> None:
    """Log metrics to a run, and to a logged model if one is given."""
    from mlflow.entities import Metric

    metrics = [Metric(clean_name(point.name), point.value, point.time, point.step, model_id) for point in points]
    client.log_batch(run_id, metrics=metrics)


def clean_name(name: str) -> str:
    """Return a metric, parameter or tag name that MLflow accepts: limited characters, and no path but a plain one."""
    text = re.sub(r"[^\w./: -]", "_", name)[:MAX_NAME]
    return "/".join(part for part in text.split("/") if part not in ("", ".", "..")) or "_"


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten `{"train": {"epochs": 3}}` to `{"train.epochs": "3"}`, values in characters and lengths of databases."""
    flat: dict[str, str] = {}
    for key, value in params.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            text = str(value).encode("utf-8", "replace").decode().replace("\0", "?")
            flat[clean_name(f"{prefix}{key}")] = text if len(text) <= MAX_PARAM else text[: MAX_PARAM - 3] + "..."
    return flat


def _params(path: Path) -> dict[str, str]:
    """Return the parameters of config.yaml, without secrets."""
    config = credentials.redacted(read_yaml(path))
    params = flatten(config) if isinstance(config, Mapping) else {}
    if not 0 < len(params) <= MAX_PARAMS:
        raise UserError(f"{path} is not a configuration of 1 to {MAX_PARAMS} values; replace it")
    return params


def _active(client: "MlflowClient", run_id: str | None) -> str | None:
    """Return the id if MLflow knows the run and nobody has deleted it."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return None
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


def _log_params(client: "MlflowClient", run_id: str, params: dict[str, str]) -> None:
    """Log parameters. MLflow's never change, so values that differ on a resume become tags `resumed.NAME`."""
    from mlflow.entities import Param, RunTag

    known = client.get_run(run_id).data.params
    new = [Param(key, value) for key, value in params.items() if key not in known]
    changed = [
        RunTag(f"resumed.{key}"[:MAX_NAME], value) for key, value in params.items() if known.get(key, value) != value
    ]
    client.log_batch(run_id, params=new, tags=changed)


def _end(client: "MlflowClient", run_id: str, run_dir: Path, state: Tracked) -> None:
    """Send files and status. If a killed trial continued in another folder, that folder decides its status."""
    for name in run_folder.FOLDERS if state.status == "FINISHED" else ():
        if (run_dir / name).is_dir():
            try:
                client.log_artifacts(run_id, str(checks.inside(run_dir, name)), name)
            except ValueError as error:
                logger.warning("%s is not sent: %s", run_dir / name, plain(str(error)))
    if state.status or client.get_run(run_id).info.status == "RUNNING":
        client.set_terminated(run_id, state.status or "KILLED", state.ended or run_folder.last_sign(run_dir))
    run_folder.update(run_dir, state.session, done=True)
