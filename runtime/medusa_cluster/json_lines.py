"""Calls over a Unix socket: a line with a JSON object for each call, and a line for its answer."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from medusa_runtime.errors import ClusterError, ConfigError, MedusaError, from_code

logger = logging.getLogger(__name__)

LONGEST_LINE_BYTES = 16 << 20

Answerer = Callable[[dict[str, Any]], Awaitable[Any]]


class JsonLinesServer:
    """A server on a Unix socket that only its own user can open. It answers a connection's calls one after the other.

    ``answer`` takes the object of a call and returns the result, which must be serializable to JSON.
    """

    def __init__(self, path: Path, answer: Answerer) -> None:
        self._path = path
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Replaces a socket that a killed process left behind."""
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.bind(str(self._path))
            self._path.chmod(0o600)  # in time: connecting is possible only once it listens
            self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=LONGEST_LINE_BYTES)
        except BaseException:
            listener.close()
            raise

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while line := await reader.readline():
                writer.write(json.dumps(await self._line(line)).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError, asyncio.CancelledError):
            pass  # the caller has gone, its line is too long, or this server closes
        finally:
            self._connections.discard(task)
            writer.close()

    async def _line(self, line: bytes) -> dict[str, Any]:
        try:
            return {"ok": await self._answer(dict(json.loads(line)))}
        except (MedusaError, ValueError, TypeError) as error:
            return error_answer(error)
        except Exception as error:
            logger.exception("a call failed")
            return error_answer(error)


def error_answer(error: Exception) -> dict[str, Any]:
    """Return the answer to a call that failed."""
    if isinstance(error, MedusaError):
        return {"error": {"code": error.code, "message": str(error)}}
    if isinstance(error, ValueError | TypeError):
        return {"error": {"code": ConfigError.code, "message": f"expected a JSON object: {error}"}}
    return {"error": {"code": ClusterError.code, "message": f"{type(error).__name__}: {error}"}}


def result_of(answer: Any, sender: str = "the server") -> Any:
    """Return the value in an answer. Raises the error in it instead, and ClusterError if it is no answer of ours."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict) and isinstance(error.get("code"), str):
        message = str(error.get("message", ""))
        if "." not in error["code"]:  # OpenAI's form, as of a gateway
            text = "but perhaps a gateway: expected the port that a node was started with as --data-port"
            raise ClusterError(f"{sender} is no node server, {text}; it answered: {message[:200]}")
        raise from_code(error["code"], message)
    if not isinstance(answer, dict) or "ok" not in answer:
        raise ClusterError(f"expected an answer with ok or error from {sender}, found {str(answer)[:200]!r}")
    return answer["ok"]


async def call(path: Path | str, request: dict[str, Any]) -> Any:
    """Send one call and return its result. Raises OSError when no process listens, and the error in the answer."""
    reader, writer = await asyncio.open_unix_connection(path, limit=LONGEST_LINE_BYTES)
    try:
        writer.write(json.dumps(request).encode() + b"\n")
        await writer.drain()
        line = await reader.readline()
        if not line.endswith(b"\n"):  # the server ended, perhaps in the middle of its answer
            raise ConnectionResetError(f"{path} closed the connection")
        return result_of(json.loads(line))
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
