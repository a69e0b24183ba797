"""Network ports: free ones of this machine, and that of a Ray cluster."""

import os
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from certizoo.errors import UserError

RAY_ADDRESS = "RAY_ADDRESS"
ANSWER_SECONDS = 10.0
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"  # the first bytes of every gRPC client


def free_port() -> int:
    """Return a port of this machine that is free now; use it soon."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def require_ray() -> None:
    """Raise UserError if RAY_ADDRESS names a cluster that does not answer: Ray would try for minutes."""
    address = os.environ.get(RAY_ADDRESS, "")
    try:
        place = urlsplit(address if "://" in address else f"//{address}")
        if place.port is None:  # unset, or a word such as auto or local
            return
        _require_answer(place.hostname or "", place.port)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{RAY_ADDRESS}={address[:200]} does not answer ({error}); start that cluster (ray status), or unset "
            f"{RAY_ADDRESS} to use this machine"
        ) from None


def _require_answer(host: str, port: int) -> None:
    """Raise OSError if nothing listens there, or the listener does not answer."""
    with socket.create_connection((host, port), ANSWER_SECONDS) as probe, suppress(ConnectionError):
        probe.sendall(HTTP2)
        probe.recv(1)  # with TLS, a server ends the connection instead
