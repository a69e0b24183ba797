"""Nodes of a Ray cluster on this machine, each a raylet in its own process group that can be killed as a whole."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from certizoo.ports import free_port
from certizoo.processes import end_group

PATIENCE, START_SECONDS = 60.0, 10
RANDOM_PORTS = ("--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats", "--num-cpus=1", "--block")
VARIABLES = {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}  # loopback only


@dataclass
class Nodes:
    """A cluster at `address`: its first node is the head; every node has one CPU."""

    address: str
    processes: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)

    def join(self) -> None:
        """Add a node."""
        port = self.address.rpartition(":")[2]
        head = ("--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false")
        words = (f"--address={self.address}",) if self.processes else head
        self.processes.append(self.stack.enter_context(_raylet(*words)))


@contextmanager
def cluster(nodes: int) -> Iterator[Nodes]:
    """Start this number of nodes and yield them when all are up; end them on exit."""
    with ExitStack() as stack:
        made = Nodes(f"127.0.0.1:{free_port()}", stack=stack)
        made.join()
        time.sleep(START_SECONDS)  # until it listens
        for _ in range(nodes - 1):
            made.join()
        time.sleep(START_SECONDS)
        yield made


def environment() -> dict[str, str]:
    """Return the environment of the nodes' processes and of the process that starts them."""
    return os.environ | VARIABLES


@contextmanager
def _raylet(*arguments: str) -> "Iterator[subprocess.Popen[bytes]]":
    command = [str(Path(sys.executable).parent / "ray"), "start", *arguments, *RANDOM_PORTS]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
    )
    try:
        yield process
    finally:
        end_group(process, PATIENCE)
