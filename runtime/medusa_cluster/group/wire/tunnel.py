"""Connections between workers that no network lets connect, as objects in a store that all of them reach.

ParaServe's production (§8.5) lets no function connect to another one. Its workers pass activations on in an object of a
remote store. Here a whole connection is passed on: what one side sends are objects with numbers, which the other side
takes one after the other. Each process has a socket for it. So handshake, encryption and messages are those of a
connection over TCP.
"""

from __future__ import annotations

import logging
import re
import secrets
import select
import socket
import threading
import time
from contextlib import suppress

from medusa_runtime.errors import EngineError
from medusa_runtime.process import hang_up
from medusa_runtime.resource_limits import as_limit_error

from .mailbox import LARGEST_OBJECT_BYTES, Mailbox, open_mailbox

logger = logging.getLogger(__name__)

_MORE_S = 0.001  # how long to wait for more bytes for the same object
_MOST_AHEAD = 64  # objects that the other side has not taken
_GONE_S = 10.0  # a side that takes none of them for so long is gone, as over TCP
_CALLS = "calls"  # the folder in which connections are announced
_CALL = re.compile("[0-9a-f]{16}")  # and how: anything else might lead out of the store's folder
# Between two looks: a look at an object store takes tens of milliseconds itself.
_SOONEST_S, _LATEST_S, _CALLS_S = 0.0005, 0.02, 0.02


def is_store_place(place: str) -> bool:
    """Return whether this is the URL or the absolute path of a shared folder, and not ``HOST:PORT``."""
    return place.startswith("/") or "://" in place


def connect_through_store(place: str) -> socket.socket:
    """Connect to the worker that listens at this place, or will. Raises EngineError if the store cannot be reached."""
    mailbox, name = open_mailbox(place), secrets.token_hex(8)
    mailbox.put(f"{_CALLS}/{name}", b"")
    return _tunnel(mailbox, name, sends="a", takes="b")


class StoreListener:
    """Accepts connections at a place, like a listening socket."""

    def __init__(self, place: str) -> None:
        self._mailbox = open_mailbox(place)
        self._closed = threading.Event()
        self._known: set[str] = set()

    def accept(self) -> tuple[socket.socket, None]:
        """Wait for a connection. Raises OSError when the listener is closed, or if the store cannot be read."""
        while not self._closed.is_set():
            try:
                calls = filter(_CALL.fullmatch, self._mailbox.names(_CALLS))
                new = [name for name in calls if name not in self._known]
            except EngineError as error:
                raise OSError(str(error)) from None
            if new:
                self._known.add(new[0])
                self._mailbox.delete(f"{_CALLS}/{new[0]}")
                return _tunnel(self._mailbox, new[0], sends="b", takes="a"), None
            self._closed.wait(_CALLS_S)
        raise OSError("this listener is closed")

    def close(self) -> None:
        self._closed.set()


def _tunnel(mailbox: Mailbox, name: str, *, sends: str, takes: str) -> socket.socket:
    """Return a socket whose bytes pass through objects. Two threads move them until either side closes."""
    ours, inner = socket.socketpair()
    ended = threading.Event()

    def send() -> None:
        _send(mailbox, f"{name}/{sends}", inner, ended)
        taking.join()
        inner.close()

    taking = threading.Thread(
        target=_take, args=(mailbox, f"{name}/{takes}", inner, ended), name="group-take", daemon=True
    )
    try:
        taking.start()
        threading.Thread(target=send, name="group-put", daemon=True).start()
    except RuntimeError as error:  # there is no room for a thread, now
        ended.set()
        ours.close()
        raise OSError(str(as_limit_error(error) or error)) from None
    return ours


def _send(mailbox: Mailbox, prefix: str, inner: socket.socket, ended: threading.Event) -> None:
    number = 0
    try:
        while piece := _piece(inner):
            if number % _MOST_AHEAD == 0 and number:
                _wait_taken(mailbox, f"{prefix}{number - _MOST_AHEAD:08}", ended)
            mailbox.put(f"{prefix}{number:08}", piece)
            number += 1
        if not ended.is_set():
            mailbox.put(f"{prefix}{number:08}", b"")  # the end
    except EngineError as error:
        logger.warning("a connection through the store broke: %s", error)
    ended.set()
    hang_up(inner)


def _wait_taken(mailbox: Mailbox, name: str, ended: threading.Event) -> None:
    """Wait until the other side has taken an object. Raises EngineError if it seems to be gone."""
    deadline = time.monotonic() + _GONE_S
    while mailbox.has(name) and not ended.wait(_LATEST_S):
        if time.monotonic() > deadline:
            raise EngineError(f"the other side has taken nothing for {_GONE_S:g} s")


def _piece(inner: socket.socket) -> bytes:
    """Return what this side has sent by now, as one object; empty at the end."""
    found = bytearray()
    with suppress(OSError):
        while len(found) < LARGEST_OBJECT_BYTES:
            if found and not select.select([inner], [], [], _MORE_S)[0]:
                break
            more = inner.recv(LARGEST_OBJECT_BYTES - len(found))
            if not more:
                break
            found += more
    return bytes(found)


def _take(mailbox: Mailbox, prefix: str, inner: socket.socket, ended: threading.Event) -> None:
    number, pause_s = 0, _SOONEST_S
    try:
        while not ended.is_set():
            name = f"{prefix}{number:08}"
            piece = mailbox.get(name)
            if piece is None:
                ended.wait(pause_s)
                pause_s = min(1.5 * pause_s, _LATEST_S)
                continue
            mailbox.delete(name)
            if not piece:
                ended.set()
                break
            inner.sendall(piece)
            number, pause_s = number + 1, _SOONEST_S
    except EngineError as error:
        logger.warning("a connection through the store broke: %s", error)
    except OSError:
        pass  # this side has closed it
    hang_up(inner)


__all__ = ["StoreListener", "connect_through_store", "is_store_place"]
