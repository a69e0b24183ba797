"""The registry in a browser: MLflow's own server on the project's store."""

import os
import signal
import socket
import subprocess
import sys

from certizoo import UserError
from certizoo.processes import end_group
from registry import credentials, store

LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def serve(uri: str | None, host: str, port: int) -> int:
    """Run the server until it ends or is interrupted, and all its processes with it; returns its exit status."""
    target = store.resolve_uri(uri)
    if store.is_server(target):
        sys.stdout.write(f"the registry has a server already: {store.public(target)}/#/models\n")
        return 0
    check_free(host, port)
    store.connect(target)  # creates the database before the server's workers race for it
    if host not in LOOPBACK:
        sys.stderr.write(f"warning: {host} is open to the network, and the server asks for no password\n")
    sys.stdout.write(f"http://{host}:{port}/#/models  (Ctrl-C ends)\n")
    sys.stdout.flush()
    return run_group(command(target, host, port), {credentials.BACKEND: target})


def command(uri: str, host: str, port: int) -> list[str]:
    """The `mlflow server` command for a resolved URI, which goes by environment: it may hold a password.

    On the loopback, clients are on this machine: experiments made through the server keep their files where
    experiments made without it do, so that either way reads both. Clients elsewhere need the server's proxy.
    """
    root = store.artifact_root(uri)
    assert root is not None
    shared = ["--default-artifact-root", root.as_uri()] if host in LOOPBACK else []
    address = ["--host", host, "--port", str(port), "--workers", "2"]
    stores = ["--artifacts-destination", root.as_uri(), *shared]
    return [sys.executable, "-m", "mlflow", "server", *address, *stores]


def check_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(f"{host}:{port} cannot be used ({error.strerror}); choose another --port") from None


def run_group(arguments: list[str], variables: dict[str, str]) -> int:
    """Run a command in a process group of its own, and end the whole group with it."""
    no_jobs = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # of GenAI: three more processes
    process = subprocess.Popen(arguments, start_new_session=True, env=os.environ | variables | no_jobs)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        end_group(process)
