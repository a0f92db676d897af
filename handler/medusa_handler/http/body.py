"""The body of the current request."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flask import g, request
from gunicorn.http.errors import ParseException
from medusa_runtime.bounded_json import VALUE_BYTES, count_values
from medusa_runtime.errors import json_kind
from werkzeug.exceptions import ClientDisconnected

from ..contract import Headers, Request, content_encoding, describe_json_error, expected_plain_body, load_json
from ..faults import ApiError
from .environ import FORCE_CLOSE, GRANT, ON_REQUEST_READ, SMALL_BODY_BYTES
from .origins import listed_origins

if TYPE_CHECKING:
    from .body_budget import Grant

_STEP_BYTES = 1 << 20
_JSON = re.compile(rb"[\s\0\xef\xbb\xbf\xfe\xff]*[\[{]")  # also in UTF-16 and with a byte order mark
_UNASKED = frozenset(("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"))
_KEYS = frozenset(("authorization", "x-api-key"))
_OWN_SITES = frozenset(("same-origin", "none"))
_WIDE = re.compile(rb"[\xf0-\xff]|\\u")


def read_body() -> bytes:
    """Return the whole body of the current request. May be called twice.

    Raises RequestEntityTooLarge if it is larger than MAX_CONTENT_LENGTH, also in chunks; ApiError 400 if it ends early;
    and ApiError 503 if other bodies take all of the memory.
    """
    if "body" not in g:
        grant = request.environ.get(GRANT)
        if grant is None or _has_arrived() or _is_too_large():
            g.body = _read(lambda _: None)
        else:
            try:
                grant.begin(request.content_length)
                g.body = _read(grant.received)
            except BaseException:
                _close()  # the rest of the body would be taken for the next request
                raise
            finally:
                grant.end()
            _reserve_parsed(grant, g.body)
    body: bytes = g.body
    return body


def refuse_pages_unasked(cors_origins: str | None) -> None:
    """Refuse the current request if a browser may have sent it for any web page (CSRF). Raises ApiError 415.

    Before a page sends JSON or a token to another origin, the browser asks that origin (Fetch standard, CORS-preflight
    fetch). It does not ask for the types in ``_UNASKED``. Pages of ``cors_origins`` may send these, too. So may those
    of this very origin, as browsers name it in Sec-Fetch-Site, which no page can set (W3C, Fetch Metadata).
    """
    origin = request.headers.get("Origin")
    if origin is None or request.mimetype not in _UNASKED or _KEYS & {name.lower() for name, _ in request.headers}:
        return
    if request.method in ("GET", "HEAD", "OPTIONS"):
        return
    if request.headers.get("Sec-Fetch-Site") in _OWN_SITES:
        return
    if cors_origins is not None and listed_origins(cors_origins) & {origin, "*"}:
        return
    raise ApiError(
        415,
        f"expected Content-Type: application/json from a web page ({origin[:100]}), found "
        f"{request.mimetype or 'none'}; --cors-origins names pages that may send others",
        code="bad_content_type",
    )


def _reserve_parsed(grant: Grant, body: bytes) -> None:
    """Wait for the memory of what will be parsed from a body, if it is JSON. Raises ApiError 413 and 503."""
    if _JSON.match(body):
        width = 4 if _WIDE.search(body) else 1  # one such character makes each of its text four bytes wide
        grant.begin_parsing(VALUE_BYTES * count_values(body), (width - 1) * len(body))


def _has_arrived() -> bool:
    """Return whether the whole body arrived before the request began."""
    headers = request.headers
    return (request.content_length or 0) <= SMALL_BODY_BYTES and not (
        "Transfer-Encoding" in headers or "Expect" in headers
    )


def _is_too_large() -> bool:
    """Return whether the body is so large that reading it raises at once."""
    most = request.max_content_length
    return most is not None and (request.content_length or 0) > most


def _read(on_piece: Callable[[int], None]) -> bytes:
    """Read the body to the end, in large steps. ``on_piece`` is called with the size of each, in bytes.

    werkzeug itself reads 64 KiB at a time, and gunicorn moves up to 1 MiB that it has read ahead for each. And werkzeug
    silently cuts a chunked body at the limit; only the next read, here the last one, raises.
    """
    body = io.BytesIO()
    try:
        while piece := request.stream.read(_STEP_BYTES):
            body.write(piece)
            on_piece(len(piece))
    except ClientDisconnected:
        raise _incomplete("the end of the connection came first") from None
    except (OSError, ParseException) as error:
        raise _incomplete(str(error)) from None
    data = body.getvalue()  # no copy: the bytes and the buffer are one
    # gunicorn declares that its input ends by itself, so werkzeug does not compare the lengths.
    if request.content_length is not None and len(data) < request.content_length:
        raise _incomplete(f"expected {request.content_length} bytes, found {len(data)}")
    on_read = request.environ.get(ON_REQUEST_READ)
    if on_read is not None:
        on_read()
    return data


def _close() -> None:
    if close := request.environ.get(FORCE_CLOSE):
        close()


def _incomplete(why: str) -> ApiError:
    _close()
    message = f"the body ended early, came too slowly or is badly chunked: {why}"
    return ApiError(400, message, code="incomplete_body")


def current_request() -> Request:
    """Return the current request, as functions see it."""
    return Request(
        method=request.method,
        path=request.path,
        headers=Headers(request.headers.items()),
        query=request.args.to_dict(),
        body=read_body(),
        id=g.request_id,
    )


def refuse_encoded() -> None:
    """Refuse the current request if its body is compressed. Raises ApiError 415.

    A thousand times as many bytes may be in such a body, and no client of these routes compresses what it sends.
    """
    if encoding := content_encoding(request.headers.get("Content-Encoding", "")):
        raise ApiError(415, expected_plain_body(encoding), code="bad_content_encoding")


def json_object() -> dict[str, Any]:
    """Return the current request's body as a JSON object. Raises ApiError 400, and 415 if it is compressed."""
    body = read_body()
    refuse_encoded()
    return as_json_object(body)


def as_json_object(data: bytes) -> dict[str, Any]:
    """Return ``data`` as a JSON object. Raises ApiError 400."""
    try:
        body = load_json(data)
    except RecursionError:
        raise ApiError(400, "expected a JSON body: it is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        found = describe_json_error(data, error)
        raise ApiError(400, f"expected a JSON body, found {found}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"expected a JSON object, found {json_kind(body)}", code="invalid_json")
    return body
