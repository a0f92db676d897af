"""What user code sees: the request, the response, the context, and the error for a client's mistake.

Nothing here is a base class to inherit from: a function or a class with ``predict`` is enough.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from medusa_runtime.bounded_json import parse_json
from medusa_runtime.errors import json_kind

_FIELD_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FIELD_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


def head_problem(status: int, headers: Iterable[tuple[str, str]]) -> str:
    """Return what HTTP cannot carry in the head of an answer (RFC 9110, sections 5 and 15); empty if it is good."""
    if not isinstance(status, int) or not 200 <= status <= 999:
        return f"the status {status!r}; expected a number from 200 to 999"
    for name, value in headers:
        if not _FIELD_NAME.fullmatch(name) or not _FIELD_VALUE.fullmatch(str(value)):
            return f"the header {name!r}, which HTTP cannot carry; expected Latin-1 without control characters"
    return ""


class HttpError(Exception):
    """An error to raise in order to answer with its status and message, such as ``HttpError(404, "no such user")``.

    Raises ValueError for a status or a header that HTTP cannot carry.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        if problem := head_problem(status, (headers or {}).items()):
            raise ValueError(f"HttpError: found {problem}")
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})


class Headers(Mapping[str, str]):
    """Headers by name, in upper or lower case. Values of the same name are joined by commas (RFC 9110, section 5.3)."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._values: dict[str, str] = {}
        self._names: dict[str, str] = {}
        for name, value in pairs:
            key = name.lower()
            self._names.setdefault(key, name)
            self._values[key] = f"{self._values[key]}, {value}" if key in self._values else value

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names.values())

    def __len__(self) -> int:
        return len(self._values)


class _NotJsonError(ValueError):
    """A number that Python's parser takes, but JSON does not have (RFC 8259, section 6)."""


def load_json(data: bytes | str) -> Any:
    """Parse JSON. Raises ValueError, also for NaN and Infinity, and RecursionError."""
    return parse_json(data, len(data), parse_constant=_refuse_constant)  # what it may hold was checked before


def _refuse_constant(name: str) -> None:
    raise _NotJsonError(f"{name}, which JSON does not have")


def describe_json_error(body: bytes, error: ValueError) -> str:
    """Describe what was found in a body that is not JSON."""
    if body.startswith(b"\x1f\x8b"):
        return "one that is compressed with gzip; send it uncompressed"
    if isinstance(error, UnicodeDecodeError):
        return f"bytes that are not UTF-8, the first at {error.start}"
    if isinstance(error, _NotJsonError):
        return str(error)
    if not body.strip():
        return "an empty body"
    if not isinstance(error, json.JSONDecodeError):
        return f"a number of more than {sys.get_int_max_str_digits()} digits"  # the only other one of the json package
    return f"something else at line {error.lineno}, column {error.colno}"


def content_encoding(header: str) -> str:
    """Return how a body is compressed, such as "gzip", from its Content-Encoding; empty if it is not."""
    found = header.strip().lower()
    return "" if found == "identity" else found


def expected_plain_body(encoding: str) -> str:
    """Return the message for a body that is compressed."""
    return f"expected the body as it is, found it encoded ({encoding[:60]}); send it uncompressed"


@dataclass(frozen=True)
class Request:
    """One HTTP request. ``query`` has the first value of each parameter.

    The defaults are for tests, which call a function without a server: ``Request(body=b'{"name": "Ada"}')``.
    """

    method: str = "POST"
    path: str = "/"
    headers: Mapping[str, str] = field(default_factory=lambda: Headers(()))
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    id: str = ""

    @property
    def text(self) -> str:
        """The body as UTF-8. Raises HttpError 400 when it is not."""
        try:
            return self.body.decode()
        except UnicodeDecodeError as error:
            raise HttpError(400, f"expected a body in UTF-8, found {describe_json_error(self.body, error)}") from None

    @property
    def json(self) -> Any:
        """The body as JSON. Raises HttpError 400 when it is not, and 415 when it is compressed."""
        try:
            return load_json(self.body)
        except RecursionError:
            raise HttpError(400, "expected a JSON body: it is nested too deeply") from None
        except ValueError as error:
            if encoding := content_encoding(self.headers.get("Content-Encoding", "")):
                raise HttpError(415, expected_plain_body(encoding)) from None
            found = describe_json_error(self.body, error)
            raise HttpError(400, f"expected a JSON body, found {found}") from None

    @property
    def object(self) -> dict[str, Any]:
        """The body as a JSON object. Raises the errors of ``json``, and HttpError 400 for any other JSON."""
        found = self.json
        if not isinstance(found, dict):
            raise HttpError(400, f"expected a JSON object, found {json_kind(found)}")
        return found


@dataclass(frozen=True)
class Response:
    """A result with its own status and headers. An iterator as ``body`` is streamed as it is, not as SSE."""

    body: str | bytes | Mapping[str, Any] | list[Any] | Iterable[str | bytes] = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str | None = None


@dataclass(frozen=True)
class Context:
    """The argument of ``load``: the model behind the function, the settings, and the weights.

    ``model`` is None when no engine runs one; ``weights.build`` fills a module of the function's own.
    """

    model: Any = None
    settings: Any = None
    weights: Any = None

    @property
    def hostname(self) -> str:
        """The name of this host, where OpenFaaS' handlers look for it."""
        return os.uname().nodename
