"""Finds out whether a connection has sent a whole request, without taking anything from it.

A request that is still coming must hold no thread: a few hundred clients that send a byte now and then would hold all
of them. So the head, and a small body behind it, wait in the kernel's buffer until they are complete. A larger body is
read by the worker, within its budget (body_budget.py).
"""

from __future__ import annotations

import re
import socket
from enum import Enum

from ..http.environ import SMALL_BODY_BYTES

HEAD_BYTES = 32 << 10  # the largest head; less than what a socket's buffer holds from the start
_PEEK_BYTES = 2 * HEAD_BYTES
_CLOSE_WAIT = 8  # TCP_INFO's state of a connection whose client will send no more
_BEGINS = re.compile(rb"(?:\r\n)*(?:[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}(?: |\Z)|\r?\Z)")
_FRAMING = re.compile(rb"\r\n(content-length|transfer-encoding|expect)[ \t]*:[ \t]*([^\r\n]*)", re.IGNORECASE)
_LENGTH = re.compile(rb"[0-9]{1,20}[ \t]*")


class Sent(Enum):
    """How much of a request has come."""

    NOTHING = "nothing"
    PART = "part"
    WHOLE = "whole"  # or the rest will never come
    HEAD = "head"  # and a body that is not waited for: a large one, or one in chunks
    TOO_LARGE = "too large"  # a head over HEAD_BYTES
    NO_HTTP = "no HTTP"
    CLOSED = "closed"


def judge(data: bytes) -> Sent:
    """Return how much of a request ``data``, its first bytes, contains. A head is not checked any further."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        if len(data) >= HEAD_BYTES:
            return Sent.TOO_LARGE
        return Sent.PART if _BEGINS.match(data) else Sent.NO_HTTP
    if end > HEAD_BYTES:
        return Sent.TOO_LARGE
    framing = _FRAMING.findall(data, 0, end + 2)
    if len(framing) == 1 and framing[0][0].lower() == b"content-length" and _LENGTH.fullmatch(framing[0][1]):
        length = int(framing[0][1])
        if length <= SMALL_BODY_BYTES:
            return Sent.PART if len(data) < end + 4 + length else Sent.WHOLE
    return Sent.HEAD if framing else Sent.WHOLE


class Incoming:
    """The part of a connection's next request that has come. Nothing is taken from the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._seen = 0
        self.data = b""

    def look(self, before: bytes = b"") -> Sent:
        """Call when the connection can be read. After PART it becomes readable again only when more has come.

        ``before`` holds the bytes of the request that were already taken from the socket.
        """
        try:
            peeked = self._connection.recv(_PEEK_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            peeked = None
        except OSError:
            return Sent.CLOSED
        if peeked == b"" and not before:
            return Sent.CLOSED
        self.data = before + (peeked or b"")
        if not self.data:
            return Sent.NOTHING
        sent = judge(self.data)
        if sent is not Sent.PART:
            self.release()
            return sent
        if peeked == b"" or (peeked and len(self.data) == self._seen and self._ended()):
            self.release()
            return Sent.WHOLE  # the reader finds the end at once
        self._seen = len(self.data)
        self._wake_at(len(peeked or b"") + 1)
        return Sent.PART

    @property
    def seen(self) -> int:
        """Bytes that were there at the last look."""
        return self._seen

    def release(self) -> None:
        """Let the connection be read as usual again."""
        if self._seen:
            self._seen = 0
            self._wake_at(1)

    def _wake_at(self, size_bytes: int) -> None:
        try:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
        except OSError:
            pass  # it has just been closed, which the next look finds

    def _ended(self) -> bool:
        try:
            return self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSE_WAIT
        except OSError:
            return True


__all__ = ["HEAD_BYTES", "Incoming", "Sent", "judge"]
