"""The acceptor: takes every connection, answers probes itself, and passes all other connections on to the worker.

It runs in gunicorn's arbiter, a process that otherwise sleeps, and starts before gunicorn is imported. So a probe does
not wait for imports, for user code that holds the interpreter's lock, or for two hundred requests that begin at once.
The worker is given a connection once a whole request has arrived (incoming_request.py), so slow clients hold no thread.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from medusa_runtime.liveness import LOOK_S
from medusa_runtime.process import receive_descriptors
from medusa_runtime.process_limits import LEAST_FILES, as_limit_error, most_files

from ..probes import ProbeResponse, Probes
from .http_date import http_date
from .incoming_request import HEAD_BYTES, IncomingRequest, RequestState
from .slow_clients import ClientSocket

logger = logging.getLogger(__name__)

KEEPALIVE_S = 75.0  # how long a connection may send nothing
_RETRY_S = 0.02  # how long to wait for room in the socket to the worker, or for a free descriptor
_MAX_WAITING = 1024  # connections with a whole request that wait for room in the socket to the worker
_MOST_AT_ONCE = 256  # connections that are looked at before new ones are accepted
_MAX_DISCARDED = 8  # pieces of 64 KiB
_MAX_PENDING = 8192  # connections that have not sent a whole request; if there are more, the oldest one is closed
# All of a request's head, and nothing behind it; anything unusual is left to the worker.
_HEAD = re.compile(
    rb"(GET|HEAD) (/[!-\"$->@-~]*)(?:\?[!-~]*)? HTTP/1\.([01])\r\n((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~]*\r\n)*)\r\n"
)
# A page's request, which names its origin, is answered with CORS headers (cors.py).
_BODY_OR_MORE = re.compile(rb"\r\n(?:content-length|transfer-encoding|expect|upgrade|origin):")
_PHRASES = {  # http.HTTPStatus takes a millisecond to import, and the first probe would wait for it
    200: "OK",
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_NO_ROOM = (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS)


@dataclass(slots=True)
class _PendingConnection:
    """A connection that has sent nothing, or a part of a request, and the time when it is closed."""

    incoming: IncomingRequest
    end: float
    recheck_at: float | None = None  # when to look at it again, if the kernel cannot report that more has come


class ProbeAcceptor:
    """A thread that accepts connections, but none while a worker is forked.

    It calls ``tick`` about every half second. From its first byte on, a request has ``read_timeout_s`` to arrive.
    """

    def __init__(
        self,
        listener: socket.socket,
        probes: Probes,
        *,
        read_timeout_s: float,
        tick: Callable[[], None],
        max_body_bytes: float = math.inf,
        cors_origins: str | None = None,
    ) -> None:
        self.handoff = HandoffSocket(listener.getsockname())
        self._listener = listener
        self._probes = probes
        self._read_timeout_s = read_timeout_s
        self._tick = tick
        self._max_body_bytes = max_body_bytes
        self._cors_origins = cors_origins
        self._next_tick = 0.0
        self._selector = selectors.DefaultSelector()
        self._busy = threading.Lock()
        self._pending: dict[socket.socket, _PendingConnection] = {}  # the oldest first
        self._max_pending = max(min(_MAX_PENDING, most_files() - LEAST_FILES - _MAX_WAITING), LEAST_FILES // 2)
        self._waiting: deque[socket.socket] = deque()

    def open(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        # Only the main thread handles signals. One that the kernel gave to this thread would not wake it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            threading.Thread(target=self._run, name="probe-acceptor", daemon=True).start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def pause_during_forks(self) -> None:
        """Accept nothing while a worker is forked, because the worker would keep such a connection open, too."""
        release = self._busy.release
        os.register_at_fork(before=self._busy.acquire, after_in_parent=release, after_in_child=release)

    def close_in_worker(self) -> None:
        self._selector.close()
        for each in (self._listener, *self._pending, *self._waiting):
            each.close()
        self.handoff.close_writing_end()

    def _run(self) -> None:
        try:
            while True:
                events = self._selector.select(_RETRY_S if self._waiting else LOOK_S)
                with self._busy:
                    self._handle([key.data for key, _ in events])
                    self._hand_off_waiting()
                    now = time.monotonic()
                    if now >= self._next_tick:
                        self._next_tick = now + LOOK_S * 0.9
                        self._close_overdue(now)
                        self._tick()
                if len(self._waiting) >= _MAX_WAITING:
                    time.sleep(_RETRY_S)  # the listener stays readable
        except BaseException:
            logger.exception("connections cannot be accepted any more")
            os._exit(70)  # the supervisor ends the instance

    def _handle(self, readable: list[socket.socket | None]) -> None:
        """Look at the connections that have sent something or ended, and accept new ones: None is the listener.

        Thousands may end at once, so new ones are not kept waiting until all of them have been looked at.
        """
        for start in range(0, len(readable), _MOST_AT_ONCE):
            some = readable[start : start + _MOST_AT_ONCE]
            for connection in some:
                if connection is not None:
                    self._dispatch(connection)
            if len(some) == _MOST_AT_ONCE or None in some:
                self._accept()
            self._hand_off_waiting()

    def _accept(self) -> None:
        while len(self._waiting) < _MAX_WAITING:
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
                continue  # the client has already left
            connection.setblocking(False)
            self._dispatch(connection)

    def _dispatch(self, connection: socket.socket) -> None:
        """Look at what the connection has sent, and decide who answers. Only a probe is read from the socket."""
        pending = self._pending.get(connection)
        incoming = self._incoming(connection) if pending is None else pending.incoming
        before = incoming.peeked_bytes
        state = incoming.peek()
        if state is RequestState.NOTHING:
            self._keep_pending(connection, incoming, KEEPALIVE_S)
        elif state is RequestState.PART:
            # The first byte ends the time for silence. From then on, the client has ``read_timeout_s`` for the request.
            pending = self._keep_pending(connection, incoming, self._read_timeout_s, anew=not before)
            if before == incoming.peeked_bytes:  # the kernel woke us for nothing, and would do so again at once
                pending.recheck_at = time.monotonic() + LOOK_S
                self._selector.unregister(connection)
        elif state is RequestState.WHOLE and (answer := self._answer(incoming.data)) is not None:
            self._send(connection, len(incoming.data), *answer)
        else:
            self._forget(connection)
            if state is RequestState.CLOSED:
                connection.close()
            elif state is RequestState.ENDED:  # here, because thousands may leave at once
                self._refuse(connection, 400, "the connection ended before the request")
            elif state is RequestState.TOO_LARGE:
                self._refuse(connection, 431, f"the request's head is larger than {HEAD_BYTES} bytes")
            elif state is RequestState.NO_HTTP:
                self._refuse(connection, 400, "expected an HTTP/1.1 request, found something else")
            elif state is RequestState.HEAD and self._probes.bodies_full:
                # Refused here, because it would cost the worker thirty times as much.
                message = "the memory for request bodies is taken; try again later"
                self._refuse(connection, 503, message, "body_memory")
            else:
                self._waiting.append(connection)

    def _answer(self, head: bytes) -> tuple[bytes, bool] | None:
        """Return the answer, and whether the connection stays open; None when the worker is to answer."""
        if not head.startswith((b"GET ", b"HEAD ")) or (request := _HEAD.fullmatch(head)) is None:
            return None
        method, path, recent, fields = request[1], request[2], request[3] == b"1", b"\r\n" + request[4].lower()
        probe = self._probes.answer(path.decode())
        if not isinstance(probe, ProbeResponse) or _BODY_OR_MORE.search(fields):
            return None
        if fields.count(b"\r\nhost:") != 1 and recent:
            return None
        lasting = recent and b"\r\nconnection:" not in fields
        status = 200 if probe.good else 503
        return _response(status, probe.status, lasting=lasting, only_head=method == b"HEAD"), lasting

    def _send(self, connection: socket.socket, taken: int, answer: bytes, lasting: bool) -> None:
        try:
            connection.recv(taken)
            connection.sendall(answer)  # less than any socket's buffer
            if lasting:
                self._keep_alive(connection)
                return
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        self._forget(connection)
        connection.close()

    def _refuse(self, connection: socket.socket, status: int, message: str, code: str = "bad_http") -> None:
        kind = "invalid_request_error" if status < 500 else "service_unavailable_error"
        error = {"message": message, "type": kind, "param": None, "code": code}
        begun = b""
        with contextlib.suppress(OSError):
            # Take the bytes that have come: closing with unread bytes would reset the connection before the answer.
            for _ in range(_MAX_DISCARDED):
                if not (piece := connection.recv(1 << 16, socket.MSG_DONTWAIT)):
                    break
                begun = begun or piece
        cors_headers: Sequence[tuple[str, str]] = ()
        if self._cors_origins is not None:
            from .cors import headers_for_head  # most instances never need it

            cors_headers = headers_for_head(self._cors_origins, begun)
        answer = _response(status, {"error": error}, lasting=False, only_head=False, more=cors_headers)
        with contextlib.suppress(OSError):
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
        connection.close()

    def _keep_pending(
        self, connection: socket.socket, incoming: IncomingRequest, limit_s: float, *, anew: bool = False
    ) -> _PendingConnection:
        pending = self._pending.get(connection)
        if pending is None:
            if len(self._pending) >= self._max_pending:
                self._time_out(next(iter(self._pending)))
            self._selector.register(connection, selectors.EVENT_READ, connection)
            pending = self._pending[connection] = _PendingConnection(incoming, time.monotonic() + limit_s)
        elif anew:
            pending.end = time.monotonic() + limit_s
        return pending

    def _keep_alive(self, connection: socket.socket) -> None:
        """Hold a connection whose request has been answered. It stays registered: registering it anew costs more."""
        pending = self._pending.get(connection)
        if pending is None or pending.recheck_at is not None:
            self._forget(connection)
            self._keep_pending(connection, self._incoming(connection), KEEPALIVE_S)
        else:
            del self._pending[connection]
            self._pending[connection] = pending  # as the newest
            pending.incoming, pending.end = self._incoming(connection), time.monotonic() + KEEPALIVE_S

    def _incoming(self, connection: socket.socket) -> IncomingRequest:
        return IncomingRequest(connection, self._max_body_bytes)

    def _forget(self, connection: socket.socket) -> None:
        pending = self._pending.pop(connection, None)
        if pending is not None and pending.recheck_at is None:
            self._selector.unregister(connection)

    def _close_overdue(self, now: float) -> None:
        for connection, pending in list(self._pending.items()):
            if pending.end <= now:
                self._time_out(connection)
            elif pending.recheck_at is not None and pending.recheck_at <= now:
                pending.recheck_at = None
                self._selector.register(connection, selectors.EVENT_READ, connection)

    def _time_out(self, connection: socket.socket) -> None:
        """Close a connection that has not sent a whole request in time. If it has sent a part, it gets 408 first."""
        begun = self._pending[connection].incoming.peeked_bytes
        self._forget(connection)
        if begun:
            message = f"the request was not there within {self._read_timeout_s:g} s"
            self._refuse(connection, 408, message)
        else:
            connection.close()

    def _hand_off_waiting(self) -> None:
        while self._waiting and self.handoff.send(self._waiting[0]):
            self._waiting.popleft().close()


def _response(
    status: int, value: object, *, lasting: bool, only_head: bool, more: Sequence[tuple[str, str]] = ()
) -> bytes:
    body = json.dumps(value).encode() + b"\n"
    lines = (
        f"HTTP/1.1 {status} {_PHRASES[status]}",
        f"Date: {http_date(int(time.time()))}",
        "Connection: " + ("keep-alive" if lasting else "close"),
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        *(("Retry-After: 1",) if status == 503 and not lasting else ()),
        *(f"{name}: {text}" for name, text in more),
    )
    return "\r\n".join((*lines, "", "")).encode() + (b"" if only_head else body)


class HandoffSocket:
    """A pair of sockets that hands connections from the acceptor to the worker. To gunicorn it is a listener."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._reading, self._writing = socket.socketpair()
        for end in (self._reading, self._writing):
            end.setblocking(False)

    def send(self, connection: socket.socket) -> bool:
        """Send a connection to the worker. Return False if there is no room, True if it is sent or can never be."""
        try:
            socket.send_fds(self._writing, [b"c"], [connection.fileno()])
        except OSError as error:
            return error.errno not in _NO_ROOM
        return True

    def accept(self) -> tuple[ClientSocket, tuple[str, int]]:
        """Accept a connection, like ``socket.accept``. Raises EMFILE before it takes one that would then be lost."""
        os.close(os.dup(self._reading.fileno()))
        data, descriptors, _ = receive_descriptors(self._reading, 1, 1)
        if not descriptors:
            raise BlockingIOError(errno.EAGAIN, "no connection came with it" if data else "the acceptor is closed")
        connection = ClientSocket(fileno=descriptors[0])
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

    def close_writing_end(self) -> None:
        self._writing.close()

    def close(self) -> None:
        self._reading.close()

    def __str__(self) -> str:
        return f"http://{self._address[0]}:{self._address[1]}"
