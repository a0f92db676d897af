"""Clients that close late: one thread throws away the bytes that they still send.

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
_MOST = 512


class LateClients:
    """Connections that have been answered and wait for the client to close its end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._leaving: dict[socket.socket, float] = {}
        threading.Thread(target=self._run, name="late-clients", daemon=True).start()

    def leave(self, connection: socket.socket) -> None:
        """Send nothing more, and close the socket when the client has closed its end or its time is over."""
        with contextlib.suppress(OSError):
            connection.setblocking(False)
            connection.shutdown(socket.SHUT_WR)
            with self._changed:
                if len(self._leaving) < _MOST:
                    self._leaving[connection] = time.monotonic() + _LIMIT_S
                    self._changed.notify()
                    return
        connection.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._leaving)
                leaving = list(self._leaving.items())
            for connection, end in leaving:
                if time.monotonic() >= end or _has_left(connection):
                    with self._changed:
                        del self._leaving[connection]
                    connection.close()
            time.sleep(_POLL_S)


def _has_left(connection: socket.socket) -> bool:
    try:
        return not connection.recv(65536)
    except BlockingIOError:
        return False
    except OSError:
        return True
