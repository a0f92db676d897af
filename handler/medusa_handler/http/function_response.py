"""Turns the result of a user's function into the HTTP response."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import flask
from werkzeug.datastructures import Headers as WerkzeugHeaders
from werkzeug.wrappers import Response as WerkzeugResponse

from ..cloud_event import is_cloud_event_class
from ..contract import Request, Response, head_problem
from ..disconnection import POLL_S
from ..faults import ClientDisconnectedError, as_exception, stream_error
from ..forked_child import ending_forked_children
from ..merge import Item, Merge
from ..user_code.user_traceback import user_traceback
from . import sse

if TYPE_CHECKING:
    from ..service import Service

logger = logging.getLogger(__name__)

_AHEAD = 8  # chunks a function may be ahead of a slow client


def respond(service: Service, result: Any, request: Request, is_disconnected: Callable[[], bool]) -> flask.Response:
    """Return the response for a function's result. ``is_disconnected`` says whether the client has left.

    Raises TypeError or ValueError for a result that cannot be sent.
    """
    if isinstance(result, flask.Response):
        return _sendable(result, request)
    if isinstance(result, WerkzeugResponse):
        return _sendable(flask.Response(result.response, result.status, result.headers), request)
    status, content_type = 200, None
    headers: Any = {}
    if isinstance(result, Response):
        status, headers, content_type = result.status, dict(result.headers), result.content_type
        if _is_stream(result.body):
            pieces = cast("Iterator[str | bytes]", result.body)
            response = flask.Response(_pieces(pieces), status, headers, content_type=content_type)
            response.call_on_close(getattr(pieces, "close", lambda: None))
            return _sendable(response, request)
        result = result.body
    elif isinstance(result, tuple) and 2 <= len(result) <= 3 and isinstance(result[1], int):
        status, headers = result[1], result[2] if len(result) == 3 else {}
        result = result[0]
    elif service.function is not None and service.function.is_event_style and isinstance(result, Mapping):
        status, headers = int(result.get("statusCode", 200)), dict(result.get("headers") or {})
        result = result.get("body") if "statusCode" in result or "body" in result else result
    elif is_cloud_event_class(type(result)):
        return _cloud_event(result)
    if _is_stream(result):
        response = Events(service, result, request, is_disconnected).response(status)
    else:
        body, kind = _body(result)
        response = flask.Response(body, 204 if result is None and status == 200 else status, content_type=kind)
    if content_type is not None:
        response.content_type = content_type
    response.headers.update(WerkzeugHeaders(headers))
    return _sendable(response, request)


def _sendable(response: flask.Response, request: Request) -> flask.Response:
    """Return ``response``. Raises ValueError if HTTP cannot carry its status or a header (RFC 9110, sections 5, 15)."""
    problem = head_problem(response.status_code, response.headers)
    length = response.headers.get("Content-Length", "0")
    if not problem and not (length.isascii() and length.isdigit()):
        problem = f"the header Content-Length: {length!r}; expected a number of bytes, or no such header"
    if problem:
        response.close()
        raise ValueError(f"the function returned {problem}")
    if "Content-Length" in response.headers and request.method != "HEAD":
        _correct_length(response, int(length))
    return response


def _correct_length(response: flask.Response, length: int) -> None:
    """Have a response's length say how long its body is.

    A function may pass on another server's headers with a body that it has decompressed. With a length that is too
    large, the client would take the next response on its connection for the rest of this one.
    """
    if response.is_sequence:
        response.content_length = response.calculate_content_length() or 0
    elif not response.direct_passthrough:
        pieces = response.response
        response.response = _measured(response.iter_encoded(), length)
        response.call_on_close(getattr(pieces, "close", lambda: None))


def _measured(pieces: Iterable[bytes], length: int) -> Iterator[bytes]:
    """Yield a body piece by piece. Raises ValueError, so that the connection is closed, if it has another length."""
    sent = 0
    for piece in pieces:
        sent += len(piece)
        yield piece
    if sent != length:
        raise ValueError(f"the function returned a body of {sent} bytes with the header Content-Length: {length}")


def _is_stream(result: Any) -> bool:
    return isinstance(result, Iterator)


def _pieces(pieces: Iterator[str | bytes]) -> Iterator[bytes]:
    """Yield a response's body piece by piece. An error that would end the process (``sys.exit``) ends only this one."""
    try:
        with ending_forked_children():
            for piece in pieces:
                yield piece.encode() if isinstance(piece, str) else piece
    except GeneratorExit:  # the server needs no more of it
        raise
    except BaseException as error:  # noqa: BLE001
        raise as_exception(error)  # noqa: B904


def _body(result: Any) -> tuple[bytes, str]:
    if result is None:
        return b"", "text/plain; charset=utf-8"
    if isinstance(result, str):
        return result.encode("utf-8", "replace"), "text/plain; charset=utf-8"
    if isinstance(result, bytes | bytearray | memoryview):
        return bytes(result), "application/octet-stream"
    return (to_json(result) + "\n").encode(), "application/json"


def to_json(result: Any) -> str:
    """Return a result as JSON text. Raises TypeError or ValueError for one that JSON cannot express."""
    if hasattr(result, "model_dump_json"):
        return str(result.model_dump_json())
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = dataclasses.asdict(result)
    try:
        return flask.json.dumps(result, default=_plain, allow_nan=False)
    except ValueError:
        if (found := _not_finite(result, "result")) is None:
            raise
        raise ValueError(
            f"the function returned {found}, which JSON cannot express (RFC 8259, section 6); expected finite numbers, "
            "None or text"
        ) from None
    except TypeError as error:
        raise TypeError(
            f"the function returned a result of type {type(result).__name__} that cannot be sent ({error}); expected "
            "dict, list, str, bytes, (body, status[, headers]), Response or an iterator"
        ) from None


def _not_finite(value: Any, place: str) -> str | None:
    """Return the first number in a result that is not finite, with its place."""
    if value is None or isinstance(value, str | int):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{json.dumps(value)} in {place}"
    if isinstance(value, Mapping):
        inside = ((each, f"{place}[{key!r}]") for key, each in value.items())
    elif isinstance(value, list | tuple):
        inside = ((each, f"{place}[{number}]") for number, each in enumerate(value))
    else:
        return _not_finite(_plain(value), place)
    return next((found for each, where in inside if (found := _not_finite(each, where)) is not None), None)


def _plain(value: Any) -> Any:
    """Convert a value inside a result: a pydantic model, a numpy scalar or array, or what Flask itself knows."""
    for method in ("model_dump", "tolist"):
        if hasattr(value, method):
            return getattr(value, method)()
    return flask.json.provider.DefaultJSONProvider.default(value)


def _cloud_event(event: Any) -> flask.Response:
    """Return the response for a reply event, in binary mode."""
    import importlib

    module = type(event).__module__
    if module.startswith("cloudevents.core"):
        from cloudevents.core.bindings.http import to_binary_event

        message = to_binary_event(event)
        return flask.Response(message.body, headers=dict(message.headers))
    headers, body = importlib.import_module(module.rpartition(".")[0]).to_binary(event)
    return flask.Response(body, headers=headers)


class Events:
    """An iterator that is sent as server-sent events, with heartbeats while it is silent."""

    def __init__(
        self, service: Service, items: Iterable[Any], request: Request, is_disconnected: Callable[[], bool]
    ) -> None:
        self._service = service
        self._merge: Merge[Any] = Merge([items], _AHEAD)
        self._request = request
        self._is_disconnected = is_disconnected
        self._checked_at = time.monotonic()

    def response(self, status: int) -> flask.Response:
        """Return the response once the first item has come, so that an error before it keeps its own status.

        If the platform allows early heartbeats, wait for at most the time between two heartbeats.
        """
        try:
            first = self._next()
            while first is None and not self._merge.done and not self._service.platform.early_heartbeats:
                first = self._next()
        except BaseException:
            self._merge.close()
            raise
        response = flask.Response(self._stream(first), status, content_type=sse.CONTENT_TYPE)
        response.call_on_close(self._merge.close)
        return response

    def _next(self) -> Item[Any] | None:
        """Return the next item; None after a silent ``heartbeat_s`` or at the end."""
        left_s = self._service.settings.heartbeat_s
        if time.monotonic() - self._checked_at >= POLL_S:
            self._check_client()
        while not self._merge.done and left_s > 0:
            item = self._merge.get(min(POLL_S, left_s))
            if item is not None:
                return item
            left_s -= POLL_S
            self._check_client()
        return None

    def _check_client(self) -> None:
        self._checked_at = time.monotonic()
        if self._is_disconnected():
            raise ClientDisconnectedError

    def _stream(self, item: Item[Any] | None) -> Iterator[bytes]:
        try:
            while True:
                if item is not None:
                    yield sse.event(item.value if isinstance(item.value, str | bytes) else to_json(item.value))
                elif self._merge.done:
                    break
                else:
                    yield sse.heartbeat(self._service)
                item = self._next()
        except ClientDisconnectedError:
            return
        except Exception as error:  # noqa: BLE001 the status has been sent, so only the stream can report it
            folder = None if self._service.function is None else self._service.function.folder
            failure, name = error, self._request.id

            def log() -> None:
                logger.error("request %s failed\n%s", name, user_traceback(failure, folder))  # noqa: TRY400

            yield sse.event({"error": stream_error(error, name, log).message})
        yield sse.DONE
