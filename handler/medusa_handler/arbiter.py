"""gunicorn, set up as a library. Importing this imports gunicorn (about 110 ms)."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from gunicorn.app.base import BaseApplication
from gunicorn.workers.gthread import ThreadWorker

from .server import STOP_GRACE_S, options

if TYPE_CHECKING:
    from medusa_runtime.config import Settings

    from .front import Front


class FunctionServer(BaseApplication):  # type: ignore[misc]
    """``boot`` runs in the worker and returns the WSGI callable and what drains it."""

    def __init__(
        self,
        listener: socket.socket,
        settings: Settings,
        boot: Callable[[], tuple[Front, Callable[[], bool]]],
    ) -> None:
        self._options = options(listener, settings)
        self._boot = boot
        self.drain: Callable[[], bool] | None = None
        super().__init__()

    def load_config(self) -> None:
        for name, value in self._options.items():
            if name in self.cfg.settings:  # older gunicorns have no control socket to disable
                self.cfg.set(name, value)

    def load(self) -> Front:
        front, self.drain = self._boot()
        return front


class Worker(ThreadWorker):  # type: ignore[misc]
    """On SIGTERM goes on accepting (a platform's probes must see 503, not a refused connection) until drained."""

    _stopping = False

    def enqueue_req(self, conn: Any) -> None:
        """A connection takes a thread when it has sent something, so that idle ones keep no probe waiting.

        gunicorn itself lets a new connection hold a thread for five seconds before it puts it where we put it at once.
        """
        if getattr(conn, "initialized", True) or getattr(conn, "data_ready", True):
            super().enqueue_req(conn)
            return
        conn.sock.setblocking(False)
        conn.set_timeout()
        self.pending_conns.append(conn)
        self.poller.register(conn.sock, selectors.EVENT_READ, partial(self.on_pending_socket_readable, conn))

    def handle_exit(self, sig: int, frame: Any) -> None:
        if not self._stopping:
            self._stopping = True
            threading.Thread(target=self._drain, name="drain", daemon=True).start()

    def _drain(self) -> None:
        if self.app.drain is not None:
            self.app.drain()
        # What is still open are idle connections: no reason to wait for them as long as for work.
        self.cfg.set("graceful_timeout", STOP_GRACE_S)
        self.alive = False
        self.method_queue.defer(lambda: None)  # wakes the loop
