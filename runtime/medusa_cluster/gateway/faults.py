"""Errors that clients of a gateway get, in OpenAI's form, or in Anthropic's from its routes."""

from __future__ import annotations

import json
import math
from typing import Any

_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error", 404: "not_found_error"}

_MESSAGE_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
OF_MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")

LARGEST_ERROR_BYTES = 256 << 10  # of an instance's error


class Fault(Exception):
    """An error to answer a request with. ``code`` is stable, and ``param`` names the field at fault."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self, path: str) -> bytes:
        """Return the body of the answer to a request for this path."""
        is_message = path in OF_MESSAGES
        other = "invalid_request_error" if self.status < 500 else "api_error" if is_message else "internal_error"
        kind = (_MESSAGE_TYPES if is_message else _TYPES).get(self.status, other)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return compact({"type": "error", "error": error} if is_message else {"error": error})

    def events(self, path: str) -> bytes:
        """Return the events that end the stream of a path with this error."""
        name = b"event: error\n" if path in OF_MESSAGES else b""
        return name + b"data: " + self.body(path) + b"\n\n" + (b"" if name else b"data: [DONE]\n\n")

    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, min(3600, math.ceil(self.retry_after_s))))}


class BrokenOffError(ConnectionResetError):
    """The client's connection was broken in the middle of its answer, because the instance was lost.

    ``status`` is what the request counts as.
    """

    status = 503


def too_large(what: str, most_bytes: int) -> Fault:
    """Return the error for an answer that a gateway does not pass on. It is the request's fault, not the instance's."""
    text = f"expected at most {most_bytes >> 20} MiB as {what}, found more; "
    return Fault(400, text + "ask for fewer log-probabilities, sequences or tokens", code="answer_too_large")


def answers_too_large(total_bytes: int) -> Fault:
    """Return the error for an answer that cannot be passed on in pieces, when answers take the memory there is."""
    text = f"large answers take the {total_bytes // 10**6} MB that they may take together (--answer-memory-mb); "
    text += "try again later, or ask for fewer log-probabilities, sequences or tokens"
    return Fault(503, text, code="answer_memory", retry_after_s=1.0)


def compact(value: Any) -> bytes:
    """Return a value as compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def error_code(body: bytes | bytearray) -> str:
    """Return the code in an error's body, or an empty string if there is none."""
    return _of_error(body, "code")


def error_message(body: bytes | bytearray) -> str:
    """Return the message in an error's body, or an empty string if there is none."""
    return _of_error(body, "message")


def _of_error(body: bytes | bytearray, name: str) -> str:
    if len(body) > LARGEST_ERROR_BYTES:
        return ""
    try:
        found = json.loads(body)["error"][name]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""
