"""Errors as the clients of a gateway see them, in OpenAI's form."""

from __future__ import annotations

import json
import math
from typing import Any

_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error", 404: "not_found_error"}


class Fault(Exception):
    """A request that gets an error for an answer. ``code`` is stable; ``param`` names the field at fault."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "internal_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return compact({"error": error})

    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, min(3600, math.ceil(self.retry_after_s))))}


def compact(value: Any) -> bytes:
    """JSON as it is sent."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def error_code(body: bytes) -> str:
    """The code in an error's body; empty where there is none."""
    return _of_error(body, "code")


def error_message(body: bytes) -> str:
    """The message in an error's body; empty where there is none."""
    return _of_error(body, "message")


def _of_error(body: bytes, name: str) -> str:
    try:
        found = json.loads(body)["error"][name]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""
