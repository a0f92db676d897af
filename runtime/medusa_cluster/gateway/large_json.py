"""The JSON of instances, which may be large. A gateway reads large texts in a thread, and serves others meanwhile."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from medusa_runtime.imports.gc_paused import gc_paused

LARGE_BYTES = 256 << 10  # a text of this size is parsed in about two milliseconds
END_BYTES = 16 << 10  # the end of a large answer, in which its usage is looked for
_LONG, _PART = 64, 1024  # lists of more values are written in parts

_Result = TypeVar("_Result")


async def run_beside(size_bytes: int, function: Callable[..., _Result], *arguments: object) -> _Result:
    """Call a function that reads JSON of this size: at once, or in the thread for large texts."""
    if size_bytes < LARGE_BYTES:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_thread(), _call, function, *arguments)


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "large-json")  # one, since parsers take turns in one process anyway


def _call(function: Callable[..., _Result], *arguments: object) -> _Result:
    with gc_paused():  # the collector would look through all values again and again
        return function(*arguments)


def parse(data: bytes) -> Any:
    """Parse JSON. Raises ValueError and RecursionError.

    No other thread can run while Python's parser works. With large texts, it therefore calls functions in Python, in
    which the interpreter lets others run.
    """
    if len(data) < LARGE_BYTES:
        return json.loads(data)
    return json.loads(data, object_hook=lambda value: value, parse_float=lambda text: float(text))


def pieces(value: Any) -> Iterator[str]:
    """Yield ``json.dumps(value, sort_keys=True)`` in pieces. Other threads can run between them."""
    if isinstance(value, dict) and value:
        before = "{"
        for name in sorted(value):
            yield f"{before}{json.dumps(name)}: "
            yield from pieces(value[name])
            before = ", "
        yield "}"
    elif isinstance(value, list) and value:
        before = "["
        for start in range(0, len(value), step := _PART if len(value) > _LONG else 1):
            yield before
            if step == 1:
                yield from pieces(value[start])
            else:
                yield json.dumps(value[start : start + step], sort_keys=True)[1:-1]
            before = ", "
        yield "]"
    else:
        yield json.dumps(value)


def usage_of(body: bytes | bytearray) -> Any:
    """Return the usage in a whole answer. In a large one it is found only near the end.

    Raises ValueError, KeyError, TypeError and RecursionError if there is none.
    """
    if len(body) < LARGE_BYTES:
        return json.loads(body)["usage"]
    return usage_at_end(body[-END_BYTES:])


def usage_at_end(end: bytes | bytearray) -> Any:
    """Return the usage in the end of an answer. Raises what ``usage_of`` does."""
    # In a JSON text, these bytes are always a name: a quotation mark in a string has a backslash before it.
    _, found, rest = end.rpartition(b'"usage":')
    if not found:
        raise ValueError("expected usage at the end of an answer, found none")
    return json.JSONDecoder().raw_decode(rest.decode("utf-8", "replace").lstrip())[0]
