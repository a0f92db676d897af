"""A server that sends exactly these bytes, whatever HTTP says of them, and counts what was taken."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

Answer = bytes | Iterable[bytes]


class ScriptedServer:
    """On loopback. Each request gets what ``answer`` makes of its head; the connection stays open if it is ``kept``.

    ``context``: of a server that speaks TLS.
    """

    def __init__(
        self, answer: Callable[[bytes], Answer], *, kept: bool = False, context: ssl.SSLContext | None = None
    ) -> None:
        self._answer = answer
        self._kept = kept
        self._context = context
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._socket.getsockname()[1])
        self.url = f"{'http' if context is None else 'https'}://127.0.0.1:{self.port}"
        self.requests: list[bytes] = []
        self.sent_bytes = 0
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._socket.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._open.add(connection)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, self._spoken(connection) as spoken:
            while head := self._receive(spoken):
                self.requests.append(head)
                answer = self._answer(head)
                for piece in [answer] if isinstance(answer, bytes) else answer:
                    spoken.sendall(piece)
                    self.sent_bytes += len(piece)
                if not self._kept:
                    break
        self._open.discard(connection)

    def _spoken(self, connection: socket.socket) -> socket.socket:
        return connection if self._context is None else self._context.wrap_socket(connection, server_side=True)

    @staticmethod
    def _receive(connection: socket.socket) -> bytes:
        """Return the head of a request, whose body is read, too."""
        received, end, length = b"", -1, 0
        while end < 0 or len(received) < end + length:
            data = connection.recv(65536)
            if not data:
                return b""
            received += data
            end = received.find(b"\r\n\r\n") + 4 if b"\r\n\r\n" in received else -1
            declared = re.search(rb"\r\ncontent-length: *(\d+)", received[:end], re.IGNORECASE)
            length = int(declared[1]) if declared else 0
        return received[:end]
