"""Connects, over the engine's socket, to the HTTP server that an engine such as vLLM's has of its own."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from ..errors import EngineError, MedusaError
from ..process import wait_readable
from . import frames

_CHECK_EVERY_S = 0.25
_RETRY_S = 0.05


def connect_http(path: str, wait_check: Callable[[], None]) -> socket.socket:
    """Connect, and wait until the engine is loaded and its server is up, calling ``wait_check`` a few times a second.

    Raises what ``wait_check`` raises, the error with which the engine answers, and EngineError if the engine ends
    during the wait.
    """
    connection = _connect(path, wait_check)
    try:
        connection.sendall(frames.pack({"type": "http"}))
        _wait(connection, wait_check)
    except BaseException:
        connection.close()
        raise
    return connection


def _wait(connection: socket.socket, wait_check: Callable[[], None]) -> None:
    reader = frames.FrameReader(connection)
    while True:
        while not reader.has_partial_frame and not wait_readable(connection, _CHECK_EVERY_S):
            wait_check()
        frame = reader.read()
        if frame is None:
            raise EngineError("the engine process ended before its HTTP server was up; try again")
        if frame["type"] == "http":
            return
        if frame["type"] == "error":
            error = frames.answer_from_frame(frame)
            raise error if isinstance(error, MedusaError) else EngineError("the engine refused a connection")


def _connect(path: str, wait_check: Callable[[], None]) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError as error:
            connection.close()
            wait_check()
            if isinstance(error, FileNotFoundError):
                raise EngineError("the engine's socket is gone: the instance is shutting down") from None
            time.sleep(_RETRY_S)
        else:
            return connection


__all__ = ["connect_http"]
