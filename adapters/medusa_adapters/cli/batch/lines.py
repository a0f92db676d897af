"""The lines of a batch: requests, and results. Their form is that of OpenAI's Batch API."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from medusa_runtime.bounded_json import TooManyValuesError, parse_json
from medusa_runtime.errors import ConfigError, json_excerpt, json_kind

_MOST_VALUES = 1_000_000
_FIELDS = ("custom_id", "method", "url", "body")
_PATH = re.compile(r"/[!-\"$->@-~]+")  # without a query
_LONGEST_ID = 512
NoteId = Callable[[str], bool]  # takes the key of a result, and returns whether it is new
INVALID = "invalid_request"  # the code of a line that is no request


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request. ``number`` is that of its line, from 1 on."""

    number: int
    custom_id: str
    url: str
    body: bytes


class BadLineError(Exception):
    """A line that is no request. ``custom_id`` is the line's, if it could be read."""

    def __init__(self, number: int, message: str, custom_id: str | None = None) -> None:
        super().__init__(f"line {number}: {message}")
        self.custom_id = custom_id


def parse_request(number: int, line: bytes | None) -> BatchRequest:
    """Read a line, which is None if it is too long. Raises BadLineError."""
    if line is None:
        raise BadLineError(number, "expected a shorter line (--max-body-mb)")
    try:
        found = parse_json(line, _MOST_VALUES, parse_constant=_refuse_constant)
    except TooManyValuesError as error:
        raise BadLineError(number, str(error)) from None
    except RecursionError:
        raise BadLineError(number, "expected JSON of less depth") from None
    except ValueError as error:
        raise BadLineError(number, f"expected a JSON object, found something else ({error})") from None
    if not isinstance(found, dict):
        raise BadLineError(number, f"expected a JSON object, found {json_kind(found)}")
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _LONGEST_ID or custom_id[0] == "\0":
        expected = f"a custom_id, a text of 1 to {_LONGEST_ID} characters"
        raise BadLineError(number, f"expected {expected}, found {json_excerpt(custom_id)}")

    def bad(message: str) -> BadLineError:
        return BadLineError(number, message, custom_id)

    for name in found:
        if name not in _FIELDS:
            raise bad(f"expected the fields {', '.join(_FIELDS)}, found {json_excerpt(name)}")
    if found.get("method") != "POST":
        raise bad(f'method: expected "POST", found {json_excerpt(found.get("method"))}')
    url = found.get("url")
    if not isinstance(url, str) or not _PATH.fullmatch(url):
        raise bad(f"url: expected a route such as /v1/chat/completions, found {json_excerpt(url)}")
    body = found.get("body")
    if not isinstance(body, dict):
        raise bad(f"body: expected an object, found {json_excerpt(body)}")
    if body.get("stream"):
        raise bad("body.stream: expected none or false, since results are whole answers, found true")
    return BatchRequest(number, custom_id, url, _compact(body))


def key_of(line: bytes) -> str:
    """Return what a result's line is about: a custom_id, or for one of no request ``bad_line_key``.

    Raises ValueError if it is no result.
    """
    found = parse_json(line)
    try:
        custom_id, error = found["custom_id"], found["error"]
        if error is not None and error["code"] == INVALID:
            return bad_line_key(str(error["message"]))
    except (LookupError, TypeError):
        raise ValueError("expected a result with custom_id and error") from None
    if not isinstance(custom_id, str):
        raise ValueError(f"expected a custom_id, found {json_kind(custom_id)}")  # noqa: TRY004 as for the rest of a line
    return custom_id


def may_become_result(begun: bytes) -> bool:
    """Return whether the whole line of what has ``begun`` may be a result."""
    return b'{"id":'.startswith(b"".join(begun[:100].split())[:6])


def bad_line_key(message: str) -> str:
    """Return what names a line that is no request, by its error's message, which has its number. No custom_id is so.

    Its custom_id does not: an earlier line may have the same, and wait for its answer.
    """
    return f"\0{message}"


def result(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Return the line of an answer. ``body`` is its JSON; what is none becomes a text."""
    head = {"id": _new_id(), "custom_id": custom_id}
    response = _compact({"status_code": status, "request_id": request_id})
    inside = b',"body":' + _one_line(body) + b"}"
    return _compact(head)[:-1] + b',"response":' + response[:-1] + inside + b',"error":null}\n'


def failure(custom_id: str | None, code: str, message: str) -> bytes:
    """Return the line of a request that has no answer."""
    error = {"code": code, "message": message}
    return _compact({"id": _new_id(), "custom_id": custom_id, "response": None, "error": error}) + b"\n"


def _new_id() -> str:
    return f"batch_req_{os.urandom(16).hex()}"


def _one_line(body: bytes) -> bytes:
    """Return a server's JSON as it is, if it stands in one line, or else written anew."""
    if body.startswith(b"{") and body.endswith(b"}") and b"\n" not in body and b"\r" not in body:
        return body
    try:
        return _compact(parse_json(body))
    except (ValueError, RecursionError):
        return _compact(body.decode(errors="replace"))


def _compact(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # lone surrogates stay what they are: two custom_ids may differ in nothing else
        return json.dumps(value, separators=(",", ":")).encode()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name}, which JSON does not have")


def note_ids(file: Any, name: str, note: NoteId) -> int:
    """Call ``note`` with the keys of a file's results, and return the size of its whole lines. Raises ConfigError."""
    whole = 0
    for _, stop, key in whole_lines(file, name):
        whole = stop
        if key is not None:
            note(key)
    return whole


def whole_lines(file: Any, name: str) -> Iterator[tuple[int, int, str | None]]:
    """Yield where each whole line of a file of results begins and ends, and its key, or None for an empty line.

    Raises ConfigError if a line is no result, nor the beginning of one.
    """
    start = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            if may_become_result(line):
                return
            raise _no_results(name, number)
        try:
            key = key_of(line) if line.strip() else None
        except (ValueError, RecursionError):
            raise _no_results(name, number) from None
        yield start, start + len(line), key
        start += len(line)


def _no_results(name: str, number: int) -> ConfigError:
    text = f"expected results of a batch, found something else in line {number}; choose another file"
    return ConfigError(f"{name}: {text}")


def there_are_results(name: str) -> ConfigError:
    return ConfigError(f"{name}: there are results already; --resume goes on behind them, or choose another file")
