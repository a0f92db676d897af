"""Ends clients that take too long to send a request, or to take its answer.

A time limit for each single read or write would not do: a client that sends or takes a byte now and then would hold
its thread for ever.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_LEAST_BYTES_PER_S = 256_000  # of a client that an answer waits for, as in a gateway of a cluster


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


class ClientSocket(socket.socket):
    """A client's connection, on which ``sendall`` ends clients that take an answer too slowly."""

    _limit_s = _waited_s = 0.0
    _sent_bytes = 0

    def begin_answer(self, limit_s: float) -> None:
        """Let the next answer wait for its client for ``limit_s`` in all, and the longer the more the client takes."""
        self._limit_s, self._waited_s, self._sent_bytes = limit_s, 0.0, 0
        # A single send may wait as long. It then has sent a part, or raises BlockingIOError.
        timeval = struct.pack("@ll", int(limit_s), int(limit_s % 1 * 1e6))
        self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def sendall(self, data: ReadableBuffer, flags: int = 0, /) -> None:
        """Send all of the data, like ``socket.sendall``. Raises ConnectionResetError if its client is too slow."""
        left = memoryview(data).cast("B")
        while left:
            if self._waited_s > self._limit_s + self._sent_bytes / _LEAST_BYTES_PER_S:
                raise ConnectionResetError(errno.ECONNRESET, "the client takes its answer too slowly")
            began = time.monotonic()
            sent = self.send(left, flags)
            self._waited_s += time.monotonic() - began
            self._sent_bytes += sent
            left = left[sent:]
