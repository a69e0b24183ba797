"""Free network ports."""

import socket


def free_port() -> int:
    """Return a port of this machine that is free now; use it soon."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
