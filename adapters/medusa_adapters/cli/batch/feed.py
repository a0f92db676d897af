"""The requests that wait or run, limited in their number and their bytes."""

from __future__ import annotations

import threading
from collections import deque

from .lines import BatchRequest

_MOST_BYTES = 256 << 20


class Feed:
    """A queue from one thread that reads to several that send. At most ``width`` requests are in it or taken."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._changed = threading.Condition()
        self._waiting: deque[BatchRequest] = deque()
        self._count = self._bytes = 0
        self._closed = self._stopped = False

    def put(self, request: BatchRequest) -> bool:
        """Wait for room, and add a request. Return False if the feed has been stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._has_room(len(request.body)))
            if self._stopped:
                return False
            self._waiting.append(request)
            self._count += 1
            self._bytes += len(request.body)
            self._changed.notify_all()
            return True

    def take(self) -> BatchRequest | None:
        """Wait for a request; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._closed or self._waiting)
            return None if self._stopped or not self._waiting else self._waiting.popleft()

    def done(self, request: BatchRequest) -> None:
        """Make room for another request."""
        with self._changed:
            self._count -= 1
            self._bytes -= len(request.body)
            self._changed.notify_all()

    def close(self) -> None:
        """Note that no more requests follow."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Drop what waits."""
        with self._changed:
            self._stopped = True
            self._waiting.clear()
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        return self._stopped

    def _has_room(self, more_bytes: int) -> bool:
        return self._count < self._width and (not self._count or self._bytes + more_bytes <= _MOST_BYTES)
