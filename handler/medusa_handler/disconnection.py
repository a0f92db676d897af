"""Checks whether a request's client has disconnected. Everything that waits for long makes them now and then."""

from __future__ import annotations

import contextvars
import socket
from collections.abc import Callable, Mapping
from typing import Any

POLL_S = 0.25  # how soon it is noticed that a client has disconnected

current_disconnect_check: contextvars.ContextVar[Callable[[], bool]] = contextvars.ContextVar(
    "current_disconnect_check"
)
"""Returns whether the client of the running request has left. Then the function's calls of the model are cancelled."""


def disconnect_check(environ: Mapping[str, Any]) -> Callable[[], bool]:
    """Return a function that checks whether the client has closed its connection.

    The socket is under gunicorn's key of the environ. The function peeks at it: an end of stream means closed, data
    means a pipelined request.
    """
    connection = environ.get("gunicorn.socket")
    if not isinstance(connection, socket.socket):
        return lambda: False

    def check() -> bool:
        try:
            return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    return check
