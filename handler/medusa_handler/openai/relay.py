"""Passes requests that our routes do not support on to the engine's own HTTP server.

The request waits, like every other, until the model is loaded, and then until that server is up. The answer's bytes are
passed on as they come. If they end early, the client's connection breaks. When the client leaves, the connection to the
server is closed, which cancels the request there.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING

from flask import Response, request
from medusa_runtime.errors import EngineError, RequestError
from medusa_runtime.process import hang_up

from ..disconnection import POLL_S
from ..faults import ApiError, UnsupportedRequestError
from ..http.body import read_body
from ..merge import Merge

if TYPE_CHECKING:
    from medusa_runtime.engine.http_response import HttpResponse

    from ..service import Service

logger = logging.getLogger(__name__)

_AHEAD = 64
_LOAD_FORMAT = "endpoint-load-metrics-format"  # asks vLLM for a header with its load, in the form of Envoy's ORCA
# Fields with values that our engines refuse and vLLM's server takes: a top_k beyond 32 bits, and the others beside a
# form of the answer. All else that an engine refuses, vLLM refuses as well, but without the field's name.
_TAKEN_BY_ENGINES = ("top_k", "min_tokens", "ignore_eos")
_FORM = "application/x-www-form-urlencoded"
# Headers that belong to a connection, not to a message (RFC 9110, section 7.6.1), or that we set ourselves.
_OF_THE_CONNECTION = frozenset(
    ("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host", "expect",
     "content-length")
)  # fmt: skip
_NOT_PASSED_ON = _OF_THE_CONNECTION | {"authorization", "x-api-key"}
_NOT_RETURNED = frozenset(("connection", "keep-alive", "transfer-encoding", "date", "server"))


def answer_or_relay(
    service: Service,
    answer: Callable[[], Response],
    is_disconnected: Callable[[], bool],
    target: str,
    body: bytes | None = None,
) -> Response:
    """Return our own ``answer`` if it takes the request, else that of the engine's server, if there is one.

    That server may take values which ours refuses, such as numbers in text. If it refuses them, too, our error is the
    answer. ``target`` is the path on it; ``body`` is that of the current request by default. Raises what both raise.
    """
    if not service.own_routes or (service.can_relay and _LOAD_FORMAT in request.headers):
        return relay(service, is_disconnected, target, body)
    try:
        return answer()
    except UnsupportedRequestError:
        if not service.can_relay:
            raise
    except (ApiError, RequestError) as error:
        if not service.can_relay or not _is_bad_value(error):
            raise
        response = relay(service, is_disconnected, target, body)
        if response.status_code != HTTPStatus.BAD_REQUEST:
            return response
        response.close()
        raise
    return relay(service, is_disconnected, target, body)


def _is_bad_value(error: ApiError | RequestError) -> bool:
    return error.param in _TAKEN_BY_ENGINES if isinstance(error, RequestError) else error.code == "invalid_value"


def relay(
    service: Service, is_disconnected: Callable[[], bool], target: str | None = None, body: bytes | None = None
) -> Response:
    """Return the answer of the engine's own server to the current request, or to another target and body.

    Raises ClientDisconnectedError, EngineError, RequestError, and ApiError 503 after ``hold_s``.
    """
    engine = service.engine
    assert engine is not None
    wait_check = service.model.wait_check(is_disconnected)
    body = read_body() if body is None else body
    head = _head(service, target, body)
    connection = engine.connect_http(wait_check)
    answer = _RelayedResponse(connection, request.method)
    try:
        connection.sendall(head + body)
        pieces: Merge[bytes] = Merge([answer], _AHEAD)
        while pieces.get(POLL_S) is None:  # until the head has come; if none comes, this raises
            wait_check()
    except BaseException:
        answer.cancel()
        raise
    found = answer.response
    assert found is not None
    headers = [(name, value) for name, value in found.headers if name not in _NOT_RETURNED]

    def stream() -> Iterator[bytes]:
        try:
            while not pieces.done:
                item = pieces.get(POLL_S)
                if item is not None:
                    yield item.value
                elif not pieces.done and is_disconnected():
                    return
        except (EngineError, ApiError) as error:  # the status has been sent, so only a broken connection can report it
            logger.warning("an answer of the engine's HTTP server is cut off: %s", error)
            raise ConnectionResetError(errno.ECONNRESET, str(error)) from error  # gunicorn does not log it as a defect
        finally:
            pieces.close()

    response = Response(stream(), found.status, headers)
    if not any(name.lower() == "content-type" for name, _ in headers):
        del response.headers["Content-Type"]  # Flask's own, text/html
    response.call_on_close(pieces.close)
    return response


def _head(service: Service, target: str | None, body: bytes) -> bytes:
    target = target or request.environ.get("RAW_URI") or request.full_path.rstrip("?")
    lines = [f"{request.method} {target} HTTP/1.1", "Host: engine", "Connection: close", f"Content-Length: {len(body)}"]
    # The engine's process may be another user's, so it does not learn this server's token.
    kept = _NOT_PASSED_ON if service.settings.token or service.settings.api_key_file else _OF_THE_CONNECTION
    lines += [f"{name}: {value}" for name, value in request.headers.items() if name.lower() not in kept]
    if body.lstrip().startswith(b"{") and request.mimetype in ("", _FORM):  # curl -d sends JSON as a form
        lines = [line for line in lines if not line.lower().startswith("content-type:")]
        lines.append("Content-Type: application/json")
    return "\r\n".join((*lines, "", "")).encode("latin-1")


class _RelayedResponse:
    """The pieces of an answer. ``response`` is its head, once the first piece, which is empty, has come."""

    def __init__(self, connection: socket.socket, method: str) -> None:
        self._connection = connection
        self._method = method
        self.response: HttpResponse | None = None

    def __iter__(self) -> Iterator[bytes]:
        from medusa_runtime.engine.http_response import (
            FieldError,
            HttpResponse,
        )  # imported after the request has been sent, while the engine works on it

        response = HttpResponse(self._connection, self._method)
        try:
            response.begin()
            self.response = response
            yield b""
            yield from response.pieces()
        except (OSError, FieldError) as error:
            what = "did not answer" if self.response is None else "broke off"
            raise EngineError(f"the engine's HTTP server {what}: {error}") from error
        finally:
            self._connection.close()

    def cancel(self) -> None:
        hang_up(self._connection)


__all__ = ["answer_or_relay", "relay"]
