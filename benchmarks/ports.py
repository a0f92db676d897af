"""A port of the loopback interface for a server that a benchmark starts."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
