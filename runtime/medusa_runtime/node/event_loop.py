"""The agent's event loop, which calls back when a channel can be read. It has no threads."""

from __future__ import annotations

import selectors
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

Watchable = int | socket.socket
TURN_S = 0.002  # for how long the channels of one account are served in a row, before those of others


@dataclass(eq=False, slots=True)
class _Watch:
    on_readable: Callable[[], None]
    account: str | None
    served: int = 0  # when it was served last, as a count


class EventLoop:
    """Watches channels for reading. A callback may unwatch its own channel, or another one.

    Accounts take turns, so that one with very many channels, or with messages that take long, does not hold up others.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._count = 0

    def watch(self, channel: Watchable, on_readable: Callable[[], None], account: str | None = None) -> None:
        """Call ``on_readable`` whenever a channel can be read. None is the account of the agent itself."""
        self._selector.register(channel, selectors.EVENT_READ, _Watch(on_readable, account))

    def unwatch(self, channel: Watchable) -> None:
        self._selector.unregister(channel)

    def run_once(self, timeout_s: float, before_each: Callable[[], None]) -> None:
        """Wait for at most ``timeout_s``, and call back for channels that can be read: for all of the agent's own.

        Of each account's channels, those that have waited for longest are served for TURN_S, and at least one of them.
        The others are served by the next calls. ``before_each`` is called before each of them.
        """
        turns: defaultdict[str | None, list[selectors.SelectorKey]] = defaultdict(list)
        for key, _ in self._selector.select(timeout_s):
            turns[key.data.account].append(key)
        own = turns.pop(None, [])
        for keys in turns.values():
            until = time.monotonic() + TURN_S
            for key in sorted(keys, key=lambda key: key.data.served):
                self._serve(key, before_each)
                if time.monotonic() > until:
                    break
        for key in own:
            self._serve(key, before_each)

    def _serve(self, key: selectors.SelectorKey, before: Callable[[], None]) -> None:
        before()
        if self._selector.get_map().get(key.fd) is key:  # an earlier callback may have unwatched it
            self._count += 1
            key.data.served = self._count
            key.data.on_readable()

    def close(self) -> None:
        self._selector.close()
