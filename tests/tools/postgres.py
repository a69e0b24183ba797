"""A real PostgreSQL of Debian's, started on a free port of the loopback, with a password."""

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from certizoo.ports import free_port

BINARIES = Path("/usr/lib/postgresql")


@contextmanager
def postgres() -> Iterator[str]:
    """Yield the URI of an empty database; skip the test where none can be started."""
    binaries = sorted(BINARIES.glob("*/bin"))
    if not binaries or os.geteuid() != 0:
        pytest.skip(
            "needs Debian's postgresql (/usr/lib/postgresql/*/bin) and root, who becomes `postgres` to start it"
        )
    folder, port, password = Path(tempfile.mkdtemp(prefix="pg")), free_port(), secrets.token_hex(8)
    (folder / "password").write_text(password)
    shutil.chown(folder, "postgres")
    shutil.chown(folder / "password", "postgres")

    def run(program: str, *arguments: str) -> None:
        command = ["runuser", "-u", "postgres", "--", str(binaries[-1] / program), *arguments]
        subprocess.run(command, check=True, timeout=120, cwd=folder, stdout=subprocess.DEVNULL)

    data = str(folder / "data")
    run("initdb", "-D", data, "-A", "scram-sha-256", "--pwfile", str(folder / "password"))
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
    run("pg_ctl", "-D", data, "-w", "-l", str(folder / "log"), "-o", options, "start")
    try:
        yield f"postgresql+psycopg://postgres:{password}@127.0.0.1:{port}/postgres"
    finally:
        run("pg_ctl", "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder)
