"""The agent's event loop, which calls back when a channel can be read. It has no threads."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

Watchable = int | socket.socket


class EventLoop:
    """Watches channels for reading. A callback may unwatch its own channel, or another one."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, channel: Watchable, on_readable: Callable[[], None]) -> None:
        self._selector.register(channel, selectors.EVENT_READ, on_readable)

    def unwatch(self, channel: Watchable) -> None:
        self._selector.unregister(channel)

    def run_once(self, timeout_s: float, before_each: Callable[[], None]) -> None:
        """Wait for at most ``timeout_s``, and call back for all channels that can be read.

        ``before_each`` is called before each of them.
        """
        for key, _ in self._selector.select(timeout_s):
            before_each()
            if self._selector.get_map().get(key.fd) is key:  # an earlier callback may have unwatched it
                key.data()

    def close(self) -> None:
        self._selector.close()
