"""Clients that take too long to send a request: their connection is shut for reading.

A time limit of each single read would not do; a client that sends a byte now and then would hold its thread for ever.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

WHOLE = "medusa.whole"  # the environ's key of a function to call when the whole request has been read
CLOSE = "medusa.close"  # of one that ends the connection with this answer


class SlowClients:
    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._reading: dict[int, tuple[socket.socket, float]] = {}

    def begin(self, connection: socket.socket) -> None:
        """Its first byte is there."""
        with self._lock:
            self._reading[id(connection)] = (connection, time.monotonic() + self._limit_s)

    def end(self, connection: socket.socket) -> None:
        """It has sent all of its request, or is closed."""
        with self._lock:
            self._reading.pop(id(connection), None)

    def shut(self) -> None:
        """End what is overdue; to be called about once a second. The reader sees an end of stream."""
        now = time.monotonic()
        with self._lock:
            for key, (connection, end) in tuple(self._reading.items()):
                if now >= end:
                    del self._reading[key]
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RD)
