"""TLS for a connection on which one thread reads while others write.

Two threads must not use an ``ssl.SSLSocket`` at the same time, but a channel's reader waits in it nearly always. So
here OpenSSL never gets the socket. It turns bytes into records in memory, under a lock, and the channel sends them.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from contextlib import suppress

from medusa_runtime.errors import EngineError
from medusa_runtime.process import wait_readable
from medusa_runtime.storage.peer_access import tls_refusal

from .message import Kind, Message

_RECEIVED_BYTES = 256 << 10
_SEALED_BYTES = 256 << 10  # how much is encrypted before a reader can get the lock
_HELLO_S = 1.0  # for the first byte from a client, which speaks first in TLS
_HANDSHAKE_RECORD = b"\x16"
_WHO = "worker"
_SPEAKS_NO_TLS = "it does not speak TLS, which this worker's certificates ask for"


class Encryption:
    """The TLS session of one connection."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, server: bool, deadline: float) -> None:
        """Carry out the TLS handshake. Raises EngineError, with the reason, if the sides do not agree, else OSError."""
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._lock = threading.Lock()
        self.refusal: str | None = None  # the error with which the other side ended the session
        try:
            while not self._agreed():
                connection.settimeout(max(deadline - time.monotonic(), 0.0))
                received = connection.recv(_RECEIVED_BYTES)
                if not received:
                    raise EngineError("it closed the connection within the TLS handshake")
                self._incoming.write(received)
        except ssl.SSLError as error:
            raise EngineError(tls_refusal(error, _WHO)) from None

    def _agreed(self) -> bool:
        try:
            self._session.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:  # send an alert, too
            with suppress(OSError):
                self._connection.sendall(self._outgoing.read())
        return True

    def seal(self, *pieces: memoryview) -> list[memoryview]:
        """Encrypt bytes. The results must be sent in the order of the calls. Raises EngineError in a broken session."""
        sealed = []
        try:
            for piece in pieces:
                at = 0
                while at < len(piece):
                    with self._lock:
                        at += self._session.write(piece[at : at + _SEALED_BYTES])
                        sealed.append(memoryview(self._outgoing.read()))
        except ssl.SSLError as error:
            raise EngineError(
                f"the connection to another worker of the group broke: {tls_refusal(error, _WHO)}"
            ) from None
        return sealed

    def receive_into(self, view: memoryview) -> int:
        """Receive and decrypt some bytes, and return their number, 0 at the end. Use it in one thread at a time."""
        while True:
            with self._lock:
                filled = self._decrypt(view)
            if filled:
                return filled
            received = self._connection.recv(_RECEIVED_BYTES)
            if not received:
                return 0
            with self._lock:
                self._incoming.write(received)

    def _decrypt(self, view: memoryview) -> int:
        filled = 0
        try:
            while filled < len(view):
                count: int = self._session.read(len(view) - filled, view[filled:])  # type: ignore[assignment]
                if not count:
                    break
                filled += count
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            if not filled:  # else the next call gets the error again
                self.refusal = tls_refusal(error, _WHO)
                raise
        return filled


def refuse_plain(connection: socket.socket, group: int) -> None:
    """Raise EngineError unless the client begins a TLS handshake.

    A client without TLS waits for our first message. It gets an error message, so that it need not wait in vain.
    """
    if wait_readable(connection, _HELLO_S) and connection.recv(1, socket.MSG_PEEK) in (_HANDSHAKE_RECORD, b""):
        return
    message = Message(Kind.ERROR, group)
    with suppress(OSError):
        connection.send(message.header(), socket.MSG_DONTWAIT)
    raise EngineError(_SPEAKS_NO_TLS)


__all__ = ["Encryption", "refuse_plain"]
