"""How much of its next request a connection has sent, found out without reading anything from it.

A request that is still coming must not hold a thread: a few hundred clients that send a byte now and then would hold
all of them. So the head waits in the kernel's buffer until it is complete, and with it a small body, or the beginning
of a large one. The worker reads the rest within its budget (body_budget.py). A socket option (SO_RCVLOWAT) says how
much must come before the connection is reported as readable again.
"""

from __future__ import annotations

import math
import re
import socket
from enum import Enum
from typing import NamedTuple

from ..http.environ import SMALL_BODY_BYTES

HEAD_BYTES = 32 << 10  # the largest head; less than what a socket's buffer holds from the start
_PEEK_BYTES = 2 * HEAD_BYTES
_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_MOST_DIGITS = 20  # of a body's length
_CLOSE_WAIT = 8  # TCP_INFO's state of a connection whose client will send no more
_BEGINS = re.compile(rb"(?:\r\n)*(?:[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}(?: |\Z)|\r?\Z)")
_FRAMING = re.compile(rb"\r\n(content-length|transfer-encoding|expect)[ \t]*:[ \t]*([^\r\n]*)", re.IGNORECASE)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;.*)?")
_END = b"\r\n\r\n"


class RequestState(Enum):
    """How much of a request has come."""

    NOTHING = "nothing"
    PART = "part"
    WHOLE = "whole"
    ENDED = "ended"  # a part, and the client will send no more
    HEAD = "head"  # and as much of a body that is large or comes in chunks as is waited for
    TOO_LARGE = "too large"  # a head over HEAD_BYTES
    NO_HTTP = "no HTTP"
    CLOSED = "closed"


class RequestProgress(NamedTuple):
    """How much of a request has come. For PART, at least ``missing_bytes`` more are needed."""

    state: RequestState
    missing_bytes: int = 0


def request_progress(data: bytes, max_body_bytes: float = math.inf) -> RequestProgress:
    """Return how much of a request ``data``, its first bytes, contains. A head is not checked any further.

    A body of more than ``max_body_bytes`` is not waited for, because it will be refused.
    """
    end = data.find(_END)
    if end < 0:
        if len(data) >= HEAD_BYTES:
            return RequestProgress(RequestState.TOO_LARGE)
        return _missing_end(data) if _BEGINS.match(data) else RequestProgress(RequestState.NO_HTTP)
    if end > HEAD_BYTES:
        return RequestProgress(RequestState.TOO_LARGE)
    framing = _FRAMING.findall(data, 0, end + 2)
    if len(framing) != 1:  # with an Expect the client waits for an answer to its head
        return RequestProgress(RequestState.HEAD if framing else RequestState.WHOLE)
    name, value = framing[0][0].lower(), framing[0][1].strip().lower()
    if name == b"content-length" and value.isdigit() and len(value) <= _MOST_DIGITS:
        length = int(value)
        if length > max_body_bytes:
            return RequestProgress(RequestState.HEAD)
        missing = end + len(_END) + min(length, SMALL_BODY_BYTES) - len(data)
        if missing > 0:
            return RequestProgress(RequestState.PART, missing)
        return RequestProgress(RequestState.WHOLE if length <= SMALL_BODY_BYTES else RequestState.HEAD)
    return _chunked_progress(data, end + len(_END)) if value == b"chunked" else RequestProgress(RequestState.HEAD)


def _chunked_progress(data: bytes, start: int) -> RequestProgress:
    """Return HEAD when all chunks have come, SMALL_BODY_BYTES of them, or something that the worker has to refuse."""
    room = start + SMALL_BODY_BYTES - len(data)
    at = start
    while room > 0:
        line = data.find(b"\r\n", at)
        if line < 0:
            return RequestProgress(RequestState.PART, min(room, _missing_line(data, at)))
        chunk = _CHUNK.fullmatch(data, at, line)
        if chunk is None:
            break
        size = int(chunk[1], 16)
        if not size:
            return RequestProgress(RequestState.HEAD) if data.find(_END, line) >= 0 else _missing_end(data)
        at = line + 2 + size + 2
        if at > len(data):
            return RequestProgress(RequestState.PART, min(room, at - len(data)))
    return RequestProgress(RequestState.HEAD)


def _missing_line(data: bytes, at: int) -> int:
    """Return the least number of bytes after which the line of a chunk's size, which begins at ``at``, is decided."""
    ending = data.endswith(b"\r", at)
    right = _CHUNK.fullmatch(data, at, len(data) - ending) is not None
    return 2 + right - ending


def _missing_end(data: bytes) -> RequestProgress:
    return RequestProgress(RequestState.PART, next(n for n in range(1, 5) if data.endswith(_END[: 4 - n])))


class IncomingRequest:
    """The part of a connection's next request that has come. Nothing is read from the socket.

    After ``peek``, ``data`` holds it, unless more is waited for: thousands of connections may wait, with 48 KB each.
    """

    def __init__(self, connection: socket.socket, max_body_bytes: float = math.inf) -> None:
        self._connection = connection
        self._max_body_bytes = max_body_bytes
        self._peeked_bytes = 0
        self.data = b""

    def peek(self, before: bytes = b"") -> RequestState:
        """Return how much of the request has come. After PART, the socket becomes readable only once enough has come.

        ``before`` holds the bytes of the request that were already taken from the socket.
        """
        try:
            peeked = self._connection.recv(_PEEK_BYTES, _PEEK)
        except BlockingIOError:
            peeked = None
        except OSError:
            return RequestState.CLOSED
        if peeked == b"" and not before:
            return RequestState.CLOSED
        data = before + (peeked or b"")
        if not data:
            return RequestState.NOTHING
        state, missing_bytes = request_progress(data, self._max_body_bytes)
        if state is RequestState.PART and (
            peeked == b"" or (peeked and len(data) == self._peeked_bytes and self._client_has_ended())
        ):
            state = RequestState.ENDED
        if state is not RequestState.PART:
            self.data = data
            self.release()
            return state
        self._peeked_bytes = len(data)
        self._wake_at(len(peeked or b"") + missing_bytes)
        return RequestState.PART

    @property
    def peeked_bytes(self) -> int:
        """The number of bytes that were there at the last ``peek``, if it found PART, else 0."""
        return self._peeked_bytes

    def release(self) -> None:
        """Let the connection be readable at the first byte again."""
        if self._peeked_bytes:
            self._peeked_bytes = 0
            self._wake_at(1)

    def _wake_at(self, size_bytes: int) -> None:
        try:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
        except OSError:
            pass  # it has just been closed, which the next ``peek`` finds

    def _client_has_ended(self) -> bool:
        try:
            return self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSE_WAIT
        except OSError:
            return True


__all__ = ["HEAD_BYTES", "IncomingRequest", "RequestProgress", "RequestState", "request_progress"]
