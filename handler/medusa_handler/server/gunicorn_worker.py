"""gunicorn, set up as a library. Importing this imports gunicorn (about 110 ms).

gunicorn has no hooks for what ``Worker`` changes, so it overrides methods, whose signatures have changed between
versions. ``OLDEST`` and ``BELOW`` bound the versions that the tests run with; pyproject.toml declares the same range.
"""

from __future__ import annotations

import contextlib
import errno
import http
import logging
import queue
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from gunicorn import __version__, version_info
from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.http import errors
from gunicorn.workers.gthread import ThreadWorker
from medusa_runtime.errors import ConfigError
from medusa_runtime.json_log import current_request_id
from medusa_runtime.process_limits import as_limit_error

from ..faults import ApiError, compact
from ..http.body_budget import BodyBudget, Grant
from ..http.environ import FORCE_CLOSE, GRANT, ON_REQUEST_READ, SMALL_BODY_BYTES
from .gunicorn_options import STOP_GRACE_S, body_memory_mb, options, threads
from .incoming_request import IncomingRequest, RequestState
from .lingering_close import LingeringClose
from .slow_clients import SlowClients

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from medusa_runtime.config import Settings
    from medusa_runtime.container_limits import OutOfMemory

    from ..probes import Probes
    from .probe_acceptor import ProbeAcceptor
    from .wsgi_gateway import WsgiGateway

logger = logging.getLogger(__name__)

OLDEST, BELOW = (27, 0), (27, 1)  # 26.2 and older keep a pipelined request that was read ahead waiting for more bytes
_RETRY_S = 0.05  # how long to wait before looking again for a free descriptor, or for a worker that has ended
_STATUSES = (
    (errors.LimitRequestLine, 414),
    (errors.LimitRequestHeaders, 431),
    (errors.UnsupportedTransferCoding, 501),
    (errors.ExpectationFailed, 417),
    (errors.ParseException, 400),
    (OSError, 400),  # an invalid chunk
)


def _closed(graceful: bool = False) -> None:
    """Do nothing: the ``close`` of a connection that LingeringClose will close."""


def check_version(found: tuple[int, ...] = version_info) -> None:
    """Raise ConfigError for a gunicorn too old for the methods overridden here; warn of an untested newer one."""
    tested = f"gunicorn>={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, BELOW))}"
    name = __version__ if found == version_info else ".".join(map(str, found))
    if found < OLDEST:
        raise ConfigError(f"expected {tested}, found {name}: pip install '{tested}'")
    if found >= BELOW:
        logger.warning("gunicorn %s is newer than the tested ones (%s)", name, tested)


def _correct(req: Any, max_body_bytes: int) -> None:
    """Check what RFC 9110 and 9112 require and gunicorn does not check. Raises gunicorn's errors."""
    fields: dict[str, str] = {}
    for name, value in req.headers:
        fields[name] = f"{fields[name]},{value}" if name in fields else value
    if req.version == (1, 1) and "HOST" not in fields:
        raise errors.InvalidHeader("HOST is missing", req=req)
    # gunicorn leaves other codings to the application, which expects the plain body.
    if fields.get("TRANSFER-ENCODING", "chunked").strip().lower() != "chunked":
        raise errors.UnsupportedTransferCoding(fields["TRANSFER-ENCODING"])
    if "close" in (option.strip().lower() for option in fields.get("CONNECTION", "").split(",")):
        req.force_close()
    req.version = min(req.version, (1, 1))  # the answer is sent in this version
    if int(fields.get("CONTENT-LENGTH") or 0) > max_body_bytes:
        req._expected_100_continue = False  # the app refuses the body, which a 100 would ask for


def _has_more(req: Any) -> bool:
    """Return whether a large part of the body has not been read from the client.

    gunicorn would wait five seconds for it in this thread, to use the connection again.
    """
    reader = getattr(req.body, "reader", None)
    return getattr(reader, "length", 0) > SMALL_BODY_BYTES or getattr(reader, "parser", None) is not None


class _Arbiter(Arbiter):  # type: ignore[misc]
    """The worker's parent, whose wait for its end does not depend on the wall clock: that may be set meanwhile."""

    def stop(self, graceful: bool = True) -> None:
        deadline = time.monotonic() + self.cfg.graceful_timeout
        self.kill_workers(signal.SIGTERM if graceful else signal.SIGQUIT)
        while self.WORKERS and time.monotonic() < deadline:
            time.sleep(_RETRY_S)
            self.reap_workers()
        self.kill_workers(signal.SIGKILL)
        super().stop(graceful)


class FunctionServer(BaseApplication):  # type: ignore[misc]
    """The gunicorn application.

    ``boot`` runs in the worker, and returns the WSGI callable and the function that drains it. ``starting`` runs in the
    parent, before each worker is forked.
    """

    def __init__(
        self,
        acceptor: ProbeAcceptor,
        settings: Settings,
        probes: Probes,
        *,
        boot: Callable[[], tuple[WsgiGateway, Callable[[], bool]]],
        starting: Callable[[], None],
        out_of_memory: OutOfMemory,
    ) -> None:
        check_version()
        self._options = options(acceptor, settings, probes.heartbeats, out_of_memory)
        self._boot = boot
        self.starting = starting
        self.heartbeats = probes.heartbeats
        self.drain: Callable[[], bool] | None = None
        self.serving = threading.local()  # each thread's request
        self.slow_clients = SlowClients(settings.read_timeout_s)
        self.write_timeout_s = settings.write_timeout_s
        self.max_body_bytes = settings.max_body_bytes
        # Bodies that are being read take at most a third of the threads; with those that wait, half of them.
        self.body_budget = BodyBudget(
            body_memory_mb(settings) * 1_000_000, readers=threads(settings) // 3, on_full=probes.set_bodies_full
        )
        super().__init__()

    def run(self) -> None:
        _Arbiter(self).run()

    def load_config(self) -> None:
        for name, value in self._options.items():
            if name in self.cfg.settings:  # older gunicorns have no control socket to disable
                self.cfg.set(name, value)

    def load(self) -> WSGIApplication:
        gateway, self.drain = self._boot()
        slow = self.slow_clients

        def handle(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            environ[ON_REQUEST_READ] = partial(slow.end, environ["gunicorn.socket"])
            environ[FORCE_CLOSE] = self.serving.request.force_close
            environ[GRANT] = self.serving.grant
            return gateway(environ, start_response)

        return handle


class _Pool(ThreadPoolExecutor):
    """A pool that makes do with the threads it has when no more can be started (ulimit -u, a container's pids)."""

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:
            if not self._threads or as_limit_error(error) is None:
                raise
            logger.warning("%s", as_limit_error(error))


class Worker(ThreadWorker):  # type: ignore[misc]
    """The worker. It accepts until it is drained, also after SIGTERM: probes must see 503, not a refused connection."""

    def init_process(self) -> None:
        # A signal handler that needs a lock hangs if it interrupts the thread that holds the lock. A SimpleQueue needs
        # none, but starting a thread does, and might fail later for lack of room; so the thread starts here.
        self._stop: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lingering_close = LingeringClose()
        threading.Thread(target=self._drain, name="drain", daemon=True).start()
        super().init_process()

    def get_thread_pool(self) -> ThreadPoolExecutor:
        return _Pool(self.cfg.threads)

    def accept(self, listener: socket.socket) -> None:
        try:
            super().accept(listener)
        except OSError as error:  # gunicorn's worker would end, and with it every stream
            if (known := as_limit_error(error)) is None:
                raise
            logger.warning("a client must wait: %s", known)
            time.sleep(_RETRY_S)

    def enqueue_req(self, conn: Any) -> None:
        """Give a connection a thread once it has sent a whole request.

        The acceptor has waited for the first request of the connection. At a further one, gunicorn would use a thread
        from the first byte on.
        """
        if not getattr(conn, "initialized", True):
            conn.data_ready = True
            super().enqueue_req(conn)
            return
        if self._is_whole(conn):
            super().enqueue_req(conn)
            return
        conn.sock.setblocking(False)
        self.poller.register(conn.sock, selectors.EVENT_READ, partial(self.on_client_socket_readable, conn))

    def on_client_socket_readable(self, conn: Any, client: Any) -> None:
        whole = self._is_whole(conn)
        # A connection that has begun a request is not idle: from its first byte on, SlowClients limits its time.
        if (whole or conn.incoming.peeked_bytes) and conn in self.keepalived_conns:
            self.keepalived_conns.remove(conn)
        if whole:
            self.poller.unregister(client)
            super().enqueue_req(conn)

    def _is_whole(self, conn: Any) -> bool:
        """Return whether the connection's next request has arrived. If not, the poller is quiet until more has come."""
        if not hasattr(conn, "incoming"):
            conn.incoming = IncomingRequest(conn.sock, self.app.max_body_bytes)
        before = conn.incoming.peeked_bytes
        state = conn.incoming.peek(conn.parser.unreader.buf.getvalue())
        if state in (RequestState.PART, RequestState.NOTHING) and (not before or before != conn.incoming.peeked_bytes):
            if not before:
                self.app.slow_clients.begin(conn.sock)
            return False
        conn.incoming.release()
        conn.incoming.data = b""  # a client may have sent 64 KB, and a thousand may wait
        return True

    def notify(self) -> None:
        """Beat for the watchdog. gunicorn calls this about once a second, from the loop that accepts.

        gunicorn's own sign of life, which it does not watch, is a file that a handler may no longer touch after setuid.
        """
        self.app.heartbeats.beat("worker")

    def handle(self, conn: Any) -> Any:
        # Head and body are two sends. Without this, the second waits up to 40 ms for the client's delayed ACK (Nagle).
        conn.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A stream may take long, but its reader must not stall.
        conn.sock.begin_answer(self.app.write_timeout_s)
        self.app.slow_clients.begin(conn.sock)
        try:
            kept = super().handle(conn)
        except BaseException:  # such as SystemExit, from user code: it would end the worker and all other streams
            logger.exception("an answer was cut off")
            kept = False
        finally:
            self.app.slow_clients.end(conn.sock)
        if not kept:
            # gunicorn would wait in its loop until the client closes, up to two seconds, and so hold up all others.
            self._lingering_close.add(conn.sock)
            conn.close = _closed
        return kept

    def handle_request(self, req: Any, conn: Any) -> Any:
        _correct(req, self.app.max_body_bytes)
        current_request_id.set("")  # this thread's last one
        grant = Grant(self.app.body_budget, conn.sock)
        self.app.serving.request, self.app.serving.grant = req, grant
        try:
            return super().handle_request(req, conn) and not _has_more(req)
        except BlockingIOError as error:  # from SO_SNDTIMEO; gunicorn does not log a reset as a defect
            raise ConnectionResetError(errno.ECONNRESET, "the client takes nothing of its answer") from error
        finally:
            grant.release()

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        """Answer a request that is not HTTP or exceeds a limit, in JSON; gunicorn's own answer would be HTML."""
        status = next((status for kind, status in _STATUSES if isinstance(exc, kind)), 500)
        if status == 500:
            logger.error("request failed", exc_info=exc)
        message = "internal error" if status == 500 else str(exc)
        body = compact(ApiError(status, message, code="bad_http").body()) + b"\n"
        head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with contextlib.suppress(OSError):
            client.sendall(head.encode() + body)

    def murder_pending(self) -> None:
        """End clients that are too slow. gunicorn calls this about once a second."""
        super().murder_pending()
        self.app.slow_clients.shut()
        self.app.body_budget.end_slow()

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._stop.put(None)

    def _drain(self) -> None:
        self._stop.get()
        if self.app.drain is not None:
            self.app.drain()
        # Only idle connections are still open, which need not be waited for as long as work.
        self.cfg.set("graceful_timeout", STOP_GRACE_S)
        self.alive = False
        self.method_queue.defer(lambda: None)  # wakes the loop
