"""Where to listen."""

import socket


def free_port() -> int:
    """A port of this machine that nobody has at the moment; who uses it soon is likely to get it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
