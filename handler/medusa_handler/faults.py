"""Errors as clients see them: a status, and a message in OpenAI's form or Anthropic's. Never a traceback."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from medusa_runtime.errors import ContextLengthError, MedusaError, OverloadedError, RequestError, json_excerpt

from .contract import HttpError

TEXT_ONLY = "this engine takes text only; for pictures or sound use --engine vllm"
_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_MESSAGE_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


_OF_MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")


class ApiError(HttpError):
    """An error of the model's routes; ``param`` names the field at fault, ``code`` is stable."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "internal_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def message_body(self) -> dict[str, Any]:
        """Return the body in the form of Anthropic's interface, with our ``param`` and ``code``."""
        kind = _MESSAGE_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error = {"type": kind, "message": self.message, "param": self.param, "code": self.code}
        return {"type": "error", "error": error}

    def body_for(self, path: str) -> dict[str, Any]:
        """Return the body in the form of the interface that a path belongs to."""
        return self.message_body() if is_of_messages(path) else self.body()


def is_of_messages(path: str) -> bool:
    """Return whether a path is one of Anthropic's interface."""
    return path.endswith(_OF_MESSAGES)


class UnsupportedRequestError(ApiError):
    """A request that is valid, but that our routes do not support. An engine's own server may."""


class ClientDisconnectedError(Exception):
    """The client has closed its connection; no answer can reach it."""


def invalid(param: str, expected: str, found: Any) -> ApiError:
    """Return the 400 for a field whose value cannot be used."""
    return ApiError(
        400, f"{param}: expected {expected}, found {json_excerpt(found)}", param=param, code="invalid_value"
    )


def unsupported(param: str, expected: str, found: Any) -> UnsupportedRequestError:
    """Return the 400 for a field whose value our routes do not support."""
    return UnsupportedRequestError(
        400, f"{param}: expected {expected}, found {json_excerpt(found)}", param=param, code="unsupported_value"
    )


def not_ready(message: str, retry_after_s: float = 1.0) -> ApiError:
    """Return a 503 for something that is not there yet."""
    return ApiError(503, message, code="not_ready", headers=retry_after(retry_after_s))


def stopping() -> ApiError:
    """Return a 503 for a request that still waited for the start when the instance was stopped."""
    return not_ready("the instance is stopping and will not become ready; try again")


def retry_after(seconds: float) -> dict[str, str]:
    """Return the header Retry-After, in whole seconds from 1 to 3600."""
    return {"Retry-After": str(max(1, min(3600, math.ceil(seconds))))}


def as_api_error(error: Exception) -> ApiError | None:
    """Return an expected error as the client sees it; None for a defect, of ours or of user code."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HttpError):
        return ApiError(error.status, error.message, headers=error.headers)
    if isinstance(error, OverloadedError):
        return ApiError(429, str(error), code="overloaded", headers=retry_after(error.retry_after_s))
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), param=error.param, code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code="invalid_value" if error.param else "bad_request")
    if isinstance(error, MedusaError):
        return ApiError(503, str(error), code=error.code, headers=retry_after(1.0))
    return None


def as_exception(error: BaseException) -> Exception:
    """Return ``error``, or a RuntimeError in place of one that would end a thread or the process (``sys.exit``)."""
    if isinstance(error, Exception):
        return error
    found = RuntimeError(f"it raised {type(error).__name__}, which ends its request alone")
    found.__cause__ = error
    return found


def internal_error(request_id: str) -> ApiError:
    """Return the answer for a client when our code or the user's is defective."""
    return ApiError(500, f"internal error; the log has the details under request id {request_id}", code="internal")


def stream_error(error: Exception, request_id: str, log: Callable[[], None]) -> ApiError:
    """Return an error of a stream whose status has been sent, as the client sees it. ``log`` logs a defect."""
    known = as_api_error(error)
    if known is None:
        log()
        known = internal_error(request_id)
    return known


def compact(value: Any) -> bytes:
    """Return a value as the JSON that is sent. A lone surrogate, as a request may have one, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
