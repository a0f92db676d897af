"""Accepts every connection, answers those that come to probe, and passes all others on to the worker.

It runs in gunicorn's arbiter, a process that otherwise sleeps, and before gunicorn is imported. So a probe waits for no
imports, no user code that holds the interpreter's lock, and no two hundred requests that begin at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import selectors
import signal
import socket
import threading
import time
from collections import deque

from medusa_runtime.resource_limits import as_limit_error

from ..probes import ProbeResponse, Probes

logger = logging.getLogger(__name__)

_SILENT_S = 1.0  # a connection that has sent nothing until then is the worker's
_RETRY_S = 0.02  # until the next look for room in the socket to the worker, or for a free descriptor
_HEAD_BYTES = 4096
_MOST_WAITING = 1024  # connections for which the worker has no room
# All of a request's head, and nothing behind it; what is odd in any way is the worker's to judge.
_HEAD = re.compile(
    rb"(GET|HEAD) (/[!-\"$->@-~]*)(?:\?[!-~]*)? HTTP/1\.([01])\r\n((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~]*\r\n)*)\r\n"
)
_BODY_OR_MORE = (b"content-length:", b"transfer-encoding:", b"expect:", b"upgrade:")
_NO_ROOM = (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS)


class ProbeAcceptor:
    def __init__(self, listener: socket.socket, probes: Probes) -> None:
        self.entrance = HandoffSocket(listener.getsockname())
        self._listener = listener
        self._probes = probes
        self._selector = selectors.DefaultSelector()
        self._busy = threading.Lock()
        self._silent: dict[socket.socket, float] = {}  # connections, and when each is passed on
        self._waiting: deque[socket.socket] = deque()

    def open(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        # A signal that the kernel gave to this thread would wake nobody: only the main thread handles it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            threading.Thread(target=self._run, name="door", daemon=True).start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def stand_still_over_forks(self) -> None:
        """Accept nothing while a worker is forked: it would keep open a connection that is just being accepted."""
        release = self._busy.release
        os.register_at_fork(before=self._busy.acquire, after_in_parent=release, after_in_child=release)

    def close_in_worker(self) -> None:
        self._selector.close()
        for each in (self._listener, *self._silent, *self._waiting):
            each.close()
        self.entrance.keep_reading_end()

    def _run(self) -> None:
        try:
            while True:
                events = self._selector.select(_RETRY_S if self._waiting else _SILENT_S if self._silent else None)
                with self._busy:
                    for key, _ in events:
                        if key.data is None:
                            self._accept()
                        else:
                            self._look(key.data)
                    self._pass_on_what_waits()
                if len(self._waiting) >= _MOST_WAITING:
                    time.sleep(_RETRY_S)  # the listener stays readable
        except BaseException:
            logger.exception("connections cannot be accepted any more")
            os._exit(70)  # the supervisor ends the instance

    def _accept(self) -> None:
        while len(self._waiting) < _MOST_WAITING:
            try:
                connection = self._listener.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:
                if known := as_limit_error(error):
                    logger.warning("a client must wait: %s", known)
                    time.sleep(_RETRY_S)
                    return
                if error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
                    raise
                continue  # it had left
            connection.setblocking(False)
            self._look(connection)

    def _look(self, connection: socket.socket) -> None:
        """What has it sent? Nothing is taken from it unless it is a probe."""
        try:
            head = connection.recv(_HEAD_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            self._keep(connection)
            return
        except OSError:
            head = b""
        self._forget(connection)
        if not head:
            connection.close()
        elif (answer := self._answer(head)) is None:
            self._waiting.append(connection)
        else:
            self._send(connection, len(head), *answer)

    def _answer(self, head: bytes) -> tuple[bytes, bool] | None:
        """The answer and whether the connection stays; None when the worker is to answer."""
        if not head.startswith((b"GET ", b"HEAD ")) or (request := _HEAD.fullmatch(head)) is None:
            return None
        method, path, recent, fields = request[1], request[2], request[3] == b"1", b"\r\n" + request[4].lower()
        told = self._probes.answer(path.decode())
        if not isinstance(told, ProbeResponse) or any(b"\r\n" + name in fields for name in _BODY_OR_MORE):
            return None
        if fields.count(b"\r\nhost:") != 1 and recent:
            return None
        lasting = recent and b"\r\nconnection:" not in fields
        body = json.dumps(told.status).encode() + b"\n"
        lines = (
            "HTTP/1.1 " + ("200 OK" if told.good else "503 Service Unavailable"),
            time.strftime("Date: %a, %d %b %Y %H:%M:%S GMT", time.gmtime()),
            "Connection: " + ("keep-alive" if lasting else "close"),
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Cache-Control: no-store",
        )
        return "\r\n".join((*lines, "", "")).encode() + (b"" if method == b"HEAD" else body), lasting

    def _send(self, connection: socket.socket, taken: int, answer: bytes, lasting: bool) -> None:
        with contextlib.suppress(OSError):
            connection.recv(taken)
            connection.sendall(answer)  # less than any socket's buffer
            if lasting:
                self._keep(connection)
                return
            connection.shutdown(socket.SHUT_WR)
        connection.close()

    def _keep(self, connection: socket.socket) -> None:
        if connection not in self._silent:
            self._selector.register(connection, selectors.EVENT_READ, connection)
            self._silent[connection] = time.monotonic() + _SILENT_S

    def _forget(self, connection: socket.socket) -> None:
        if self._silent.pop(connection, None) is not None:
            self._selector.unregister(connection)

    def _pass_on_what_waits(self) -> None:
        now = time.monotonic()
        for connection in [connection for connection, end in self._silent.items() if end <= now]:
            self._forget(connection)
            self._waiting.append(connection)
        while self._waiting and self.entrance.send(self._waiting[0]):
            self._waiting.popleft().close()


class HandoffSocket:
    """Where the worker accepts: connections that the door has passed on. gunicorn takes it for a listening socket."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._reading, self._writing = socket.socketpair()
        for end in (self._reading, self._writing):
            end.setblocking(False)

    def send(self, connection: socket.socket) -> bool:
        """False when there is no room; a connection that nobody will take is dropped."""
        try:
            socket.send_fds(self._writing, [b"c"], [connection.fileno()])
        except OSError as error:
            return error.errno not in _NO_ROOM
        return True

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        """As a socket's. Raises EMFILE before it takes what would then be lost."""
        os.close(os.dup(self._reading.fileno()))
        data, descriptors, _, _ = socket.recv_fds(self._reading, 1, 1)
        if not descriptors:
            raise BlockingIOError(errno.EAGAIN, "no connection came with it" if data else "the door is closed")
        connection = socket.socket(fileno=descriptors[0])
        try:
            return connection, connection.getpeername()[:2]
        except OSError:
            connection.close()
            raise ConnectionAbortedError(errno.ECONNABORTED, "the client has left") from None

    def fileno(self) -> int:
        return self._reading.fileno()

    def getsockname(self) -> tuple[str, int]:
        return self._address

    def setblocking(self, flag: bool) -> None: ...

    def keep_reading_end(self) -> None:
        self._writing.close()

    def close(self) -> None:
        self._reading.close()

    def __str__(self) -> str:
        return f"http://{self._address[0]}:{self._address[1]}"
