"""Lingering close: one thread discards what clients still send after their answer, until they close their end.

Closing at once would reset the connection of a client that is still sending, which would then lose the answer. Waiting
in the thread that answered would let such clients hold every thread, and probes would wait.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_LIMIT_S = 2.0
_POLL_S = 0.02
_MAX_CONNECTIONS = 512


class LingeringClose:
    """Connections that have been answered, and are closed once their client has closed its end or its time is over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lingering: dict[socket.socket, float] = {}
        threading.Thread(target=self._run, name="lingering-close", daemon=True).start()

    def add(self, connection: socket.socket) -> None:
        """Send nothing more, and close the socket when the client has closed its end or its time is over."""
        with contextlib.suppress(OSError):
            connection.setblocking(False)
            connection.shutdown(socket.SHUT_WR)
            with self._changed:
                if len(self._lingering) < _MAX_CONNECTIONS:
                    self._lingering[connection] = time.monotonic() + _LIMIT_S
                    self._changed.notify()
                    return
        connection.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lingering)
                lingering = list(self._lingering.items())
            for connection, end in lingering:
                if time.monotonic() >= end or _has_left(connection):
                    with self._changed:
                        del self._lingering[connection]
                    connection.close()
            time.sleep(_POLL_S)


def _has_left(connection: socket.socket) -> bool:
    try:
        return not connection.recv(65536)
    except BlockingIOError:
        return False
    except OSError:
        return True
