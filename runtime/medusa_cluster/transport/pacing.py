"""Pacing and marks that let a node's answers to requests go before the weights that it sends.

The kernel paces each connection (SO_MAX_PACING_RATE, socket(7)). That needs no privileges and no queueing discipline.
The marks are for queues that heed them: SO_PRIORITY on this machine, IP_TOS in the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_SO_MAX_PACING_RATE = 47
_UNLIMITED = (1 << 64) - 1
# A paced connection's socket takes the bytes of 1/25 s (40 ms) ahead. With 10 ms, waking the sender costs twice the CPU
# time.
_UNSENT_PER_S, _LEAST_UNSENT_BYTES = 25, 64 << 10
_SENT_WITHIN_MS = 1000
_PRIORITY_SERVING = 6  # the highest priority that needs no privilege
_STALLED_MS = 10_000
_TOS_SERVING, _TOS_WEIGHTS = 0xB8, 0x08  # expedited forwarding; throughput before delay


class Pacer:
    """A limit on the weights that a node sends, over all connections together. It may change while they flow.

    Thread-safe.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._bytes_per_s = bytes_per_s
        self._sending: Counter[socket.socket] = Counter()
        self._paced: dict[socket.socket, int] = {}
        self._lock = threading.Lock()

    @property
    def bytes_per_s(self) -> float | None:
        """The limit in bytes a second, or None for as fast as the link allows."""
        return self._bytes_per_s

    def set(self, bytes_per_s: float | None) -> None:
        """Limit weights to so many bytes a second. None removes the limit."""
        with self._lock:
            self._bytes_per_s = bytes_per_s
            self._share()

    @contextmanager
    def sending(self, connection: socket.socket) -> Iterator[None]:
        """Let a connection share the limit while the block runs, that is, while it has something to send.

        Leaving the block waits until the kernel has sent nearly everything it took. Otherwise megabytes that are still
        in the socket would share the link with the connection that sends next. They would come on top of the limit,
        and if both connections have the same reader, later bytes would delay earlier ones.
        """
        with self._lock:
            self._sending[connection] += 1
            self._share()
        try:
            yield
        finally:
            _wait_sent(connection)
            with self._lock:
                self._sending[connection] -= 1
                if not self._sending[connection]:
                    del self._sending[connection]
                    self._paced.pop(connection, None)
                self._share()

    def _share(self) -> None:
        limit = self._bytes_per_s
        each = _UNLIMITED if limit is None else max(int(limit / max(len(self._sending), 1)), 1)
        unsent = 0 if limit is None else max(each // _UNSENT_PER_S, _LEAST_UNSENT_BYTES)
        for connection in self._sending:
            if self._paced.get(connection) != each:
                with contextlib.suppress(OSError):  # it has just ended
                    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, each.to_bytes(8, "little"))
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent)
                self._paced[connection] = each


def _wait_sent(connection: socket.socket) -> None:
    """Wait until the kernel has sent nearly everything it took, for a second at most."""
    with contextlib.suppress(OSError):  # it has just ended
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _LEAST_UNSENT_BYTES)
        writable = select.poll()
        writable.register(connection, select.POLLOUT)
        writable.poll(_SENT_WITHIN_MS)


def connection_of(transport: asyncio.BaseTransport | None) -> socket.socket | None:
    """Return the socket of a request's transport, or None if the connection has ended."""
    found = None if transport is None else transport.get_extra_info("socket")
    return None if found is None else getattr(found, "_sock", found)


def mark_serving(connection: socket.socket) -> None:
    """Mark a connection whose bytes a user waits for: requests, activations, keys and values."""
    _mark(connection, _TOS_SERVING)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _PRIORITY_SERVING)


def mark_weights(connection: socket.socket) -> None:
    """Mark a connection that carries weights. The kernel ends it if its reader takes nothing for 10 s.

    The congestion control becomes CUBIC, if the machine allows that. A node of a chain sends each chunk when it
    arrives, so again and again it has nothing to send for a moment. BBR then held chunks back for 20 to 55 ms.
    """
    _mark(connection, _TOS_WEIGHTS)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STALLED_MS)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


def _mark(connection: socket.socket, tos: int) -> None:
    with contextlib.suppress(OSError):
        if connection.family == socket.AF_INET6:
            connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, tos)
        else:
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)


__all__ = ["Pacer", "connection_of", "mark_serving", "mark_weights"]
