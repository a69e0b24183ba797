"""The MLflow server to which a search's trials send their results.

SQLite allows one writer, so several concurrent trials need a server. On one machine it is started here on the loopback
for the duration of the search; for several machines the user names one.
"""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from certizoo import UserError
from certizoo.commit import ROOT
from certizoo.ports import LOOPBACK, free_port
from certizoo.processes import end_group
from certizoo.registry.server import store
from certizoo.registry.tracking import run_folder, runs
from certizoo.registry.versions import publish
from tuning.guard import end_with_parent
from tuning.search import Search
from tuning.trial import PATIENCE_SECONDS

HOW = (
    "start one that all nodes reach (docker compose -f cluster/mlflow/compose.yaml up -d), then "
    "export MLFLOW_TRACKING_URI=http://USER:PASSWORD@HOST:5000"
)
START_SECONDS = 600


@contextmanager
def registry(nodes: int, at_once: int, log: Path) -> Iterator[str]:
    """Yield the trials' URI: the user's, or that of a server that ends with the search."""
    uri = store.resolve_uri()
    if nodes > 1 and (uri.startswith(store.SQLITE) or urlsplit(uri).hostname in LOOPBACK):
        raise UserError(f"{nodes} nodes cannot share {store.public(uri)}; {HOW}")
    if at_once == 1 or not uri.startswith(store.SQLITE):
        yield uri
        return
    with started(uri, log) as url:
        yield url


@contextmanager
def started(uri: str, log: Path, host: str = "127.0.0.1") -> Iterator[str]:
    """Run `certizoo registry ui` on a free port of `host`.

    The URI is passed by environment: it may hold a password.
    """
    port = free_port()
    command = [sys.executable, "-m", "certizoo.registry", "ui", "--host", host, "--port", str(port)]
    code = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | {"MLFLOW_TRACKING_URI": uri, "PYTHONPATH": os.pathsep.join(code)}
    if host not in LOOPBACK:
        variables |= {"MLFLOW_SERVER_ALLOWED_HOSTS": f"{host}:*"}
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=end_with_parent,
            cwd=log.parent, env=variables,
        )  # fmt: skip
    try:
        url = f"http://{host}:{port}"
        wait_for(url, process, log)
        yield url
    finally:
        end_group(process, PATIENCE_SECONDS)


def wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait for the server's answer. Raises UserError if it ended or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise UserError(f"the MLflow server for this search did not start; see {log}, or set MLFLOW_TRACKING_URI")


def settle(search: Search, uri: str) -> list[Path]:
    """Send to `uri` what trials kept while the registry did not answer; return the run folders that still wait.

    Then every trial has one version. The run folders name the server of this search, which has ended: `uri` is the
    store behind it.
    """
    left = []
    for run_dir in run_folder.below(search.folder / "trials"):
        try:
            if runs.waiting(run_dir):
                runs.sync(run_dir, uri)
            publish.sync(run_dir, uri)
        except store.Away:
            left.append(run_dir)
    with suppress(store.Away):
        publish.keep_one_a_trial(search.id, uri)
    return left
