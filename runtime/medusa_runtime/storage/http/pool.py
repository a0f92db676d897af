"""A pool of connections that are kept for the next request."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .endpoint import Endpoint
from .wire import Connection


class ConnectionPool:
    """Idle connections by endpoint, and the connection that each thread is using. Thread-safe."""

    def __init__(self) -> None:
        self._idle: dict[Endpoint, list[Connection]] = {}
        self._busy: dict[int, Connection] = {}  # by thread
        self._lock = threading.Lock()
        self._closed = False

    def take(self, endpoint: Endpoint, connect: Callable[[], Connection]) -> tuple[Connection, bool]:
        """Return a connection for this thread, and whether it was used before. If none is idle, call ``connect``."""
        with self._lock:
            if idle := self._idle.get(endpoint):
                used = self._busy[threading.get_ident()] = idle.pop()
                return used, True
        made = connect()
        with self._lock:
            self._busy[threading.get_ident()] = made
        return made, False

    def give_back(self, connection: Connection) -> None:
        """Keep this thread's connection for the next request, or close it if it cannot be used again."""
        with self._lock:
            self._busy.pop(threading.get_ident(), None)
            if self._closed or not connection.reusable:  # a request that is no longer needed may outlive the store
                connection.close()
                return
            idle = self._idle.setdefault(connection.endpoint, [])
            if connection not in idle:
                idle.append(connection)

    def interrupt(self, thread: int) -> None:
        """Interrupt the connection that another thread is using, so that the thread does not wait any longer."""
        with self._lock:
            if connection := self._busy.get(thread):
                connection.interrupt()

    def close(self) -> None:
        """Close the idle connections now, and each of the others when it is given back."""
        with self._lock:
            self._closed = True
            for idle in self._idle.values():
                for connection in idle:
                    connection.close()
            self._idle.clear()
