"""The body of the current request."""

from __future__ import annotations

import json
from typing import Any

from flask import request

from .faults import ApiError


def read_body() -> bytes:
    """All of it. Raises RequestEntityTooLarge over MAX_CONTENT_LENGTH, also when it came in chunks.

    werkzeug silently cuts a chunked body at the limit; only the next read raises.
    """
    data = request.get_data(cache=False)
    request.stream.read(1)
    return data


def json_object() -> dict[str, Any]:
    """The body as a JSON object. Raises ApiError 400."""
    data = read_body()
    try:
        body = json.loads(data)
    except RecursionError:
        raise ApiError(400, "expected a JSON body: it is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        found = "an empty body" if not data.strip() else str(error)
        raise ApiError(400, f"expected a JSON body, found {found}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"expected a JSON object, found {type(body).__name__}", code="invalid_json")
    return body
