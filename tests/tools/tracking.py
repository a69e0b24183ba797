"""A training as the registry sees it: a configuration, rows of metrics, and a tracker."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from certizoo.registry.server import store
from certizoo.registry.tracking import run_folder
from certizoo.registry.tracking.track import Tracker

AWAY = "http://127.0.0.1:9"  # the discard port: connection refused
SOME: Mapping[str, Any] = {"a": 1}


def begin(run_dir: Path, uri: str, params: Mapping[str, Any] = SOME, name: str = "r", **how: Any) -> Tracker:
    """Start a session in the experiment `e`; all rows are sent at once, unless `how` says otherwise."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / run_folder.CONFIG).write_text(yaml.safe_dump(dict(params)))
    tracker = Tracker(run_dir, "e", name, uri, **({"flush_seconds": 0.0} | how))
    tracker.start()
    return tracker


def log(tracker: Tracker, step: int, **metrics: float) -> None:
    """Write a row as the trainer does."""
    row = {"step": step, "epoch": 0, "time": run_folder.now(), **metrics}
    with (tracker.run_dir / run_folder.ROWS).open("a") as file:
        file.write(json.dumps(row) + "\n")
    tracker.flush()


def kill(tracker: Tracker) -> None:
    """Let the kernel's lock go, which is what other processes see of a kill."""
    tracker._alive.close()


def runs_of(uri: str) -> list[Any]:
    """Return MLflow's runs of the experiment `e`."""
    client = store.connect(uri)
    return list(client.search_runs([store.experiment_id(client, "e")]))


def history(uri: str, run_id: str | None, name: str) -> list[tuple[int, float]]:
    """Return the steps and values of a metric."""
    assert run_id
    return [(m.step, m.value) for m in store.connect(uri).get_metric_history(run_id, name)]
