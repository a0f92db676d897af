"""The form of artifacts with many numbers: zlib-compressed JSON, in which arrays are base64 of little-endian bytes."""

from __future__ import annotations

import base64
import json
import sys
import zlib
from array import array
from collections.abc import Iterable
from typing import Any

from ..bounded_json import parse_json

# What reading such an artifact may raise.
PACKING_ERRORS = (ValueError, LookupError, TypeError, AttributeError, RecursionError, zlib.error)


def packed(document: dict[str, Any]) -> bytes:
    return zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 9)


def unpacked(data: bytes, most_bytes: int) -> Any:
    """Return a packed document. Raises one of PACKING_ERRORS, also for JSON of more than ``most_bytes``."""
    engine = zlib.decompressobj()
    text = engine.decompress(data, most_bytes)
    if engine.unconsumed_tail or not engine.eof:
        raise ValueError(f"cut short, or more than {most_bytes:,} bytes")
    return parse_json(text)


def array_text(kind: str, values: Iterable[int]) -> str:
    """Return values as text. ``kind`` is the type code of their array."""
    return base64.b64encode(_swapped(array(kind, values)).tobytes()).decode()


def array_of(kind: str, text: str) -> array[int]:
    """Return the values of a text of ``array_text``. Raises ValueError or TypeError."""
    values = array(kind)
    values.frombytes(base64.b64decode(text))
    return _swapped(values)


def _swapped(values: array[int]) -> array[int]:
    """Return values of this machine's byte order in little-endian order, or the other way round."""
    if sys.byteorder == "big":
        values.byteswap()
    return values


__all__ = ["PACKING_ERRORS", "array_of", "array_text", "packed", "unpacked"]
