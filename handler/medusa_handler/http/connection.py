"""The client's end of a request: whether it is still there."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any


def gone(environ: Mapping[str, Any]) -> Callable[[], bool]:
    """Return a function that checks whether the client has closed its connection.

    The socket is under gunicorn's key of the environ. The function looks at it without reading: an end of stream means
    closed, data means a pipelined request.
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
