"""JSON from strangers. Parsed values take up to thirty times the text's memory, so they are counted beforehand.

A text of 30 MB that is only ``[],[],[],…`` takes 800 MB, and no other thread runs for the seconds of its parsing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from .imports.gc_paused import gc_paused

VALUE_BYTES = 128  # the memory of a value, about; an object with one member takes twice that
MOST_VALUES = 5_000_000  # of a file; more than a checkpoint of half a million tensors needs
_MOST_STRINGS = 1_000_000  # more are not looked for
_LARGE_BYTES = 1 << 20
_OTHER_BYTES = bytes(set(range(256)) - set(b'"[{,'))
_STRING = re.compile(rb'"[^"]*"')


class TooManyValuesError(ValueError):
    """A text has more values than its parser allows."""


def count_values(text: bytes, *, exact_above: int = 100_000) -> int:
    """Return an upper bound of the number of values in a JSON text.

    Each value begins with ``[`` or ``{``, or stands beside a comma. Those in strings are left out if there seem to be
    more than ``exact_above`` values, which takes longer.
    """
    most = text.count(b",") + text.count(b"[") + text.count(b"{") + 1
    if most <= exact_above or b"\0" in text:  # UTF-16 has NUL bytes, and other quotes
        return most
    outside = text.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHER_BYTES)
    if outside.count(b'"') > 2 * _MOST_STRINGS:
        return most
    return len(_STRING.sub(b"", outside)) + 1


def parse_json(text: bytes | str, most_values: int = MOST_VALUES, **options: Callable[..., Any]) -> Any:
    """Parse JSON of at most ``most_values`` values, with json.loads' ``options``. Raises ValueError, RecursionError."""
    if len(text) > most_values:
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        if (found := count_values(data, exact_above=most_values)) > most_values:
            raise TooManyValuesError(f"expected at most {most_values:,} values in JSON, found {found:,}")
    if len(text) < _LARGE_BYTES:
        return json.loads(text, **options)  # type: ignore[arg-type]
    with gc_paused():  # the collector would look through all values again and again
        return json.loads(text, **options)  # type: ignore[arg-type]


__all__ = ["MOST_VALUES", "VALUE_BYTES", "TooManyValuesError", "count_values", "parse_json"]
