"""A limit on the memory of all request bodies together. A body is granted its memory before it is read.

A small body arrives in the kernel's buffer as a whole (incoming_request.py) and is not counted. Larger bodies wait
their turn, and are refused with 503 after a while. While some wait, clients that send too slowly lose their place.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..faults import ApiError, retry_after

# Memory taken beside a body while it is read: an eighth of it by Python, and gunicorn's copies of the last pieces.
_GROWTH, _COPIES, _COPIED_BYTES = 8, 4, 8 << 20
_CHUNKED_BYTES = 1 << 20  # the step by which a body of unknown size grows
_WAIT_TIMEOUT_S = 10.0
_POLL_S = 0.05
_GRACE_S, _SLOW_BYTES_PER_S = 2.0, 256e3  # a slower client may be cut off while others wait


class _Waiting(NamedTuple):
    grant: Grant
    needed_bytes: int
    turn: threading.Event


class BodyBudget:
    """The memory for request bodies. At most ``readers`` bodies are read at a time, and half as many wait.

    Each of them holds a thread meanwhile.
    """

    def __init__(self, total_bytes: int, readers: int, on_full: Callable[[bool], None]) -> None:
        """``on_full`` is called with True when no further body may wait, and with False when one may."""
        self._total_bytes = total_bytes
        self._most_readers = max(readers, 1)
        self._most_waiting = max(readers // 2, 1)
        self._lock = threading.Lock()
        self._on_full = on_full
        self._waiting: deque[_Waiting] = deque()
        self._reading: set[Grant] = set()
        self.used_bytes = 0
        self.refused = 0

    def begin(self, grant: Grant, size_bytes: int) -> None:
        """Wait for room for a body. Raises ApiError 503 when there is none in time, or too many wait already."""
        beside = size_bytes // _GROWTH + min(_COPIES * size_bytes, _COPIED_BYTES)
        waiting = _Waiting(grant, min(size_bytes + beside, self._total_bytes), threading.Event())
        with self._lock:
            if len(self._waiting) >= self._most_waiting:
                raise self._refusal(f"{len(self._waiting)} others wait already")
            self._waiting.append(waiting)
            self._advance()
        if waiting.turn.wait(_WAIT_TIMEOUT_S):
            return
        with self._lock:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._advance()
                raise self._refusal(f"none became free within {_WAIT_TIMEOUT_S:g} s")

    def _advance(self) -> None:
        """Let waiting bodies begin while there is room, first come, first served."""
        while self._waiting and len(self._reading) < self._most_readers and self._fits(self._waiting[0].needed_bytes):
            grant, needed, turn = self._waiting.popleft()
            grant.began, grant.granted_bytes = time.monotonic(), needed
            self.used_bytes += needed
            self._reading.add(grant)
            turn.set()
        self._on_full(len(self._waiting) >= self._most_waiting)

    def grow(self, grant: Grant, more_bytes: int) -> None:
        """Grant memory for more of a body of unknown size; wait a while for it. Raises ApiError 503."""
        end = time.monotonic() + _WAIT_TIMEOUT_S
        while True:
            with self._lock:
                if grant.granted_bytes >= self._total_bytes:
                    return
                if self._fits(more_bytes):
                    grant.granted_bytes += more_bytes
                    self.used_bytes += more_bytes
                    return
                if time.monotonic() >= end:
                    raise self._refusal(f"none became free within {_WAIT_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)

    def grow_by_values(self, grant: Grant, values_bytes: int, text_bytes: int) -> None:
        """Grant memory for what is parsed from a body. Raises ApiError 413 and 503."""
        left_bytes = self._total_bytes - grant.granted_bytes
        if values_bytes > left_bytes:
            message = (
                f"the body's JSON has too many values for the memory for request bodies "
                f"({self._total_bytes // 1_000_000} MB, --body-memory-mb)"
            )
            raise ApiError(413, message, code="body_too_large")
        self.grow(grant, min(values_bytes + text_bytes, left_bytes))

    def has_read(self, grant: Grant) -> None:
        """Note that a body has been read, and free the memory that was held beside it."""
        with self._lock:
            if grant in self._reading:
                self._reading.remove(grant)
                self._give_back(grant, max(grant.granted_bytes - grant.received_bytes, 0))

    def release(self, grant: Grant) -> None:
        """Free all memory of a grant, when its body is no longer needed."""
        with self._lock:
            self._reading.discard(grant)
            self._give_back(grant, grant.granted_bytes)

    def _give_back(self, grant: Grant, size_bytes: int) -> None:
        if size_bytes:
            grant.granted_bytes -= size_bytes
            self.used_bytes -= size_bytes
            self._advance()

    def end_slow(self) -> None:
        """Cut off clients that send too slowly: the oldest first, one for each that waits. Call about once a second."""
        now = time.monotonic()
        with self._lock:
            slow = [grant for grant in self._reading if grant.is_slow(now - grant.began)]
            for grant in sorted(slow, key=lambda grant: grant.began)[: len(self._waiting)]:
                with contextlib.suppress(OSError):
                    grant.connection.shutdown(socket.SHUT_RD)

    def _fits(self, more_bytes: int) -> bool:
        return self.used_bytes + more_bytes <= self._total_bytes

    def _refusal(self, why: str) -> ApiError:
        self.refused += 1
        message = (
            f"the memory for request bodies ({self._total_bytes // 1_000_000} MB) is taken: {why}; try again later"
        )
        return ApiError(503, message, code="body_memory", headers=retry_after(1.0))


class Grant:
    """One request's share of the budget."""

    def __init__(self, budget: BodyBudget, connection: socket.socket) -> None:
        self.connection = connection
        self.began = 0.0
        self.granted_bytes = self.received_bytes = 0
        self._budget = budget
        self._room_bytes: int | None = None  # None if the body's size is known, and so granted as a whole

    def is_slow(self, age_s: float) -> bool:
        """Return whether so little has come in ``age_s`` seconds that the client may be cut off."""
        return age_s > _GRACE_S and self.received_bytes < age_s * _SLOW_BYTES_PER_S

    def begin(self, size_bytes: int | None) -> None:
        """Wait for room, before reading a body that has not arrived yet. Raises ApiError 503.

        ``size_bytes`` is None when the body comes in chunks.
        """
        if size_bytes is None:
            self._room_bytes = _CHUNKED_BYTES
        self._budget.begin(self, _CHUNKED_BYTES if size_bytes is None else size_bytes)

    def received(self, count: int) -> None:
        """Note that ``count`` bytes have come. Raises ApiError 503 when there is no room for those that follow."""
        self.received_bytes += count
        while self._room_bytes is not None and self.received_bytes >= self._room_bytes:
            step = self._room_bytes  # doubled each time, so that a large body asks for memory only a few times
            self._budget.grow(self, step)
            self._room_bytes += step

    def begin_parsing(self, values_bytes: int, text_bytes: int) -> None:
        """Wait for room for what is parsed from the body: values, and text that takes more memory than its bytes.

        Raises ApiError 503 if there is none in time, and 413 if there will never be enough for the values.
        """
        self._budget.grow_by_values(self, values_bytes, text_bytes)

    def end(self) -> None:
        """Free the memory that was held beside the body. Call when the body has been read, or will not be."""
        self._budget.has_read(self)

    def release(self) -> None:
        """Free all memory of the grant, when the body is no longer needed."""
        self._budget.release(self)


__all__ = ["BodyBudget", "Grant"]
