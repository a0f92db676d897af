"""Connections between workers that no network lets connect, as objects in a store that all of them reach.

ParaServe's production (§8.5) lets no function connect to another one. Its workers pass activations on in an object of a
remote store. Here a whole connection is passed on: what one side sends are objects with numbers, which the other side
takes one after the other. Each process has a socket for it. So handshake, encryption and messages are those of a
connection over TCP.

The objects of a connection are in a folder of its own, which both sides remove in the end. A listener removes those of
connections whose two sides were killed.
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
from medusa_runtime.process_limits import as_limit_error

from .mailbox import LARGEST_OBJECT_BYTES, BoundedMailbox, Mailbox

logger = logging.getLogger(__name__)

_MORE_S = 0.001  # how long to wait for more bytes for the same object
_MOST_AHEAD = 64  # objects that the other side has not taken
_GONE_S = 10.0  # a side that takes none of them for so long is gone, as over TCP
_LEFT_S = 30.0  # objects that have been there for so long, and are the only ones of a connection, are of no use
_BYTES, _END = b"\1", b"\0"  # the first byte of an object: more follow it, or it is the end of what one side sends
_CALLS = "calls"  # the folder in which connections are announced
_CALL = re.compile("[0-9a-f]{16}")  # and how: anything else might lead out of the store's folder
# Between two looks, which stores charge for, and which take tens of milliseconds themselves: a part of the time for
# which nothing has come. So little time is lost, and few looks are in vain.
_SOONEST_S, _LATEST_S = 0.0005, 0.02
_IDLE_PART, _IDLE_S = 100, 0.25  # after seconds, and at most


def is_store_place(place: str) -> bool:
    """Return whether this is the URL or the absolute path of a shared folder, and not ``HOST:PORT``."""
    return place.startswith("/") or "://" in place


def connect_through_store(place: str) -> socket.socket:
    """Connect to the worker that listens at this place, or will. Raises EngineError if the store cannot be reached."""
    mailbox, name = BoundedMailbox(place), secrets.token_hex(8)
    mailbox.put(f"{_CALLS}/{name}", _BYTES)
    return _Tunnel(mailbox, name, sends="a", takes="b").socket


class StoreListener:
    """Accepts connections at a place, like a listening socket."""

    def __init__(self, place: str) -> None:
        self._mailbox = BoundedMailbox(place)
        self._closed = threading.Event()
        self._known: set[str] = set()
        self._failed = False
        self._came_at = time.monotonic()  # the last connection
        threading.Thread(target=_remove_leftovers, args=(self._mailbox,), name="group-leftovers", daemon=True).start()

    def accept(self) -> tuple[socket.socket, None]:
        """Wait for a connection. Raises OSError when the listener is closed, or if the store cannot be read."""
        while not self._closed.is_set():
            try:
                calls = set(filter(_CALL.fullmatch, self._mailbox.names(_CALLS)))
                self._known &= calls  # the others cannot come again
                new = sorted(calls - self._known)
                if new:
                    self._known.add(new[0])
                    self._mailbox.delete(f"{_CALLS}/{new[0]}")
            except EngineError as error:
                if not self._failed:
                    logger.warning("other workers cannot connect to this one now: %s", error)
                self._failed = True
                raise OSError(str(error)) from None
            self._failed = False
            if new:
                self._came_at = time.monotonic()
                return _Tunnel(self._mailbox, new[0], sends="b", takes="a").socket, None
            self._closed.wait(max(_pause_s(self._came_at), _LATEST_S))
        raise OSError("this listener is closed")

    def close(self) -> None:
        self._closed.set()


def _remove_leftovers(mailbox: Mailbox) -> None:
    """Remove the objects of connections in which nothing moves any more, because both sides were killed."""
    with suppress(EngineError):
        before = _objects(mailbox)
        time.sleep(_LEFT_S)
        for name, objects in _objects(mailbox).items():
            if objects and objects == before.get(name):
                mailbox.clear(name)


def _objects(mailbox: Mailbox) -> dict[str, set[str]]:
    """Return the names of the objects of each connection."""
    return {name: set(mailbox.names(name)) for name in filter(_CALL.fullmatch, mailbox.names(""))}


class _Tunnel:
    """One connection. Two threads move the bytes of ``socket`` to and from objects, until either side closes it."""

    def __init__(self, mailbox: Mailbox, name: str, *, sends: str, takes: str) -> None:
        self._mailbox, self._name = mailbox, name
        self._sends, self._takes = f"{name}/{sends}", f"{name}/{takes}"
        self._ended = threading.Event()
        self._broken = False
        self.socket, self._inner = socket.socketpair()
        self._taking = threading.Thread(target=self._take, name="group-take", daemon=True)
        try:
            self._taking.start()
            threading.Thread(target=self._send, name="group-put", daemon=True).start()
        except RuntimeError as error:  # there is no room for a thread, now
            self._ended.set()
            self.socket.close()
            raise OSError(str(as_limit_error(error) or error)) from None

    def _send(self) -> None:
        try:
            self._send_pieces()
        except EngineError as error:
            self._break(error)
        self._ended.set()
        hang_up(self._inner)
        self._taking.join()
        self._inner.close()
        with suppress(EngineError):
            self._mailbox.delete(self._call)
            self._mailbox.clear(self._name)

    def _send_pieces(self) -> None:
        number = 0
        while piece := _piece(self._inner):
            if number % _MOST_AHEAD == 0 and number and not self._is_taken(number - _MOST_AHEAD):
                raise EngineError(f"the other side has taken nothing for {_GONE_S:g} s")
            self._mailbox.put(f"{self._sends}{number:08}", piece)
            number += 1
        if not self._ended.is_set() and not self._mailbox.has(self._call):  # else nobody listens
            self._mailbox.put(f"{self._sends}{number:08}", _END)
            self._is_taken(number)

    def _is_taken(self, number: int) -> bool:
        """Wait until the other side has taken an object. Return False if it seems to be gone."""
        deadline = time.monotonic() + _GONE_S
        while self._mailbox.has(f"{self._sends}{number:08}") and not self._ended.wait(_LATEST_S):
            if time.monotonic() > deadline:
                return False
        return True

    def _take(self) -> None:
        number, came_at = 0, time.monotonic()
        try:
            while not self._ended.is_set():
                name = f"{self._takes}{number:08}"
                piece = self._mailbox.get(name)
                if piece is None:
                    self._ended.wait(_pause_s(came_at))
                    continue
                self._mailbox.delete(name)
                if piece == _END:
                    self._ended.set()
                    break
                self._inner.sendall(_sent(piece, name))
                number, came_at = number + 1, time.monotonic()
        except EngineError as error:
            self._break(error)
        except OSError:
            pass  # this side has closed it
        hang_up(self._inner)

    def _break(self, error: EngineError) -> None:
        if not self._broken:
            logger.warning("a connection through the store broke: %s", error)
        self._broken = True

    @property
    def _call(self) -> str:
        return f"{_CALLS}/{self._name}"


def _pause_s(came_at: float) -> float:
    """Return how long to wait for the next object, where the last one came at this time (time.monotonic)."""
    quiet_s = time.monotonic() - came_at
    return max(_SOONEST_S, min(quiet_s / 2, _LATEST_S), min(quiet_s / _IDLE_PART, _IDLE_S))


def _piece(inner: socket.socket) -> bytes:
    """Return what this side has sent by now, as one object; empty at the end."""
    found = bytearray(_BYTES)
    with suppress(OSError):
        while len(found) < LARGEST_OBJECT_BYTES:
            if len(found) > 1 and not select.select([inner], [], [], _MORE_S)[0]:
                break
            more = inner.recv(LARGEST_OBJECT_BYTES - len(found))
            if not more:
                break
            found += more
    return bytes(found) if len(found) > 1 else b""


def _sent(piece: bytes, name: str) -> memoryview:
    """Return the bytes in an object. Raises EngineError if it is none of a connection's."""
    if piece[:1] != _BYTES:
        raise EngineError(f"{name}: expected bytes of another worker, found something else")
    return memoryview(piece)[1:]


__all__ = ["StoreListener", "connect_through_store", "is_store_place"]
