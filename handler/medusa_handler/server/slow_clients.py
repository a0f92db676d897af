"""Shuts the connections of clients that take too long to send a request.

A time limit for each single read would not do: a client that sends a byte now and then would hold its thread for ever.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class SlowClients:
    """The connections that are sending a request, and until when each may."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._reading: dict[int, tuple[socket.socket, float]] = {}

    def begin(self, connection: socket.socket) -> None:
        """Start a client's time, at the first byte of its request. Another call does not extend it."""
        with self._lock:
            self._reading.setdefault(id(connection), (connection, time.monotonic() + self._limit_s))

    def end(self, connection: socket.socket) -> None:
        """Stop a client's time. Call when all of the request has been read, or the connection is closed."""
        with self._lock:
            self._reading.pop(id(connection), None)

    def shut(self) -> None:
        """Shut down the connections that are overdue, so that their readers see an end. Call about once a second."""
        now = time.monotonic()
        with self._lock:
            for key, (connection, end) in tuple(self._reading.items()):
                if now >= end:
                    del self._reading[key]
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RD)
