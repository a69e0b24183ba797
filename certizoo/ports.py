"""Network ports: free ones of this machine, and that of a Ray cluster."""

import logging
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from certizoo.errors import UserError

log = logging.getLogger(__name__)
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # this machine alone
RAY_ADDRESS = "RAY_ADDRESS"
ANSWER_SECONDS = 10.0
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"  # the first bytes of every gRPC client


def free_port() -> int:
    """Return a port of this machine that is free now; use it soon."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ray_address() -> str | None:
    """Return the address for `ray.init`: None for Ray's own choice, 'local' for a cluster of this process alone.

    Ray joins RAY_ADDRESS, or the cluster that was last started on this machine, and tries either for minutes. One that
    was started here and has died is therefore left out, with a warning. Raises UserError if RAY_ADDRESS does not
    answer.
    """
    address = os.environ.get(RAY_ADDRESS, "")
    try:
        _require_answer(address)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{RAY_ADDRESS}={address[:200]} does not answer ({error}); start that cluster (ray status), or unset "
            f"{RAY_ADDRESS} to use this machine"
        ) from None
    last = "" if address else _last_started()
    try:
        _require_answer(last)
    except (OSError, ValueError):
        log.warning("the Ray cluster %s, started here before, does not answer: using this machine alone", last[:200])
        return "local"
    return None


def _last_started() -> str:
    """Return the address that Ray notes when a cluster is started or joined on this machine, or ''."""
    note = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    return note.read_text().strip() if note.is_file() else ""


def _require_answer(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT, or the listener does not answer; words such as auto pass."""
    place = urlsplit(address if "://" in address else f"//{address}")
    if place.port is None:
        return
    with (
        socket.create_connection((place.hostname or "", place.port), ANSWER_SECONDS) as probe,
        suppress(ConnectionError),
    ):
        probe.sendall(HTTP2)
        probe.recv(1)  # with TLS, a server ends the connection instead
