"""The registry in a browser: MLflow's own server on the project's store."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

from certizoo import UserError
from certizoo.ports import LOOPBACK
from certizoo.processes import end_group
from certizoo.registry.server import credentials, store

LOOK_SECONDS = 0.2  # maximum delay before a signal is handled


def serve(uri: str | None, host: str, port: int) -> int:
    """Run the server until it ends or is interrupted, end all its processes, and return its exit status."""
    target = store.resolve_uri(uri)
    if store.is_server(target):
        sys.stdout.write(f"the registry already has a server: {store.public(target)}/#/models\n")
        return 0
    check_free(host, port)
    store.connect(target)  # creates the database before the server's workers race for it
    if host not in LOOPBACK:
        sys.stderr.write(f"warning: {host} is open to the network, and the server has no password\n")
    sys.stdout.write(f"http://{host}:{port}/#/models  ({way_to_end()} ends)\n")
    sys.stdout.flush()
    return run_group(command(target, host, port), {credentials.BACKEND: target})


def command(uri: str, host: str, port: int) -> list[str]:
    """Return the `mlflow server` command for a resolved URI, which is passed by environment: it may hold a password.

    On the loopback, clients are on this machine. Experiments made through the server keep their files in the same place
    as experiments made without it, so that both can read both. Clients elsewhere need the server's proxy.
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


def way_to_end() -> str:
    return "Ctrl-C" if signal.SIGINT in ending_signals() else f"kill {os.getpid()}"


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end the server.

    A script's background job and `nohup` ignore Ctrl-C or the terminal's end so that they outlive it; these stay
    ignored.
    """
    ours = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    return [*ours, signal.SIGTERM]


def run_group(arguments: list[str], variables: dict[str, str]) -> int:
    """Run a command in its own process group and end the whole group with it.

    Signals are recorded and never raise: an exception during the start, or a second Ctrl-C during the end, would leave
    processes behind that no terminal reaches.
    """
    no_jobs = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # of GenAI: three more processes
    got: list[int] = []
    for number in ending_signals():
        signal.signal(number, lambda number, _: got.append(number))
    process = subprocess.Popen(arguments, start_new_session=True, env=os.environ | variables | no_jobs)
    try:
        return wait_for(process, got)
    finally:
        end_group(process)


def wait_for(process: "subprocess.Popen[bytes]", got: list[int]) -> int:
    """Return the exit status of the process, or that of a received signal: Ctrl-C is the ordinary end."""
    while not got:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(LOOK_SECONDS)
    return 0 if got[0] == signal.SIGINT else 128 + got[0]
