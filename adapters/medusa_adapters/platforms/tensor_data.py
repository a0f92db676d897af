"""Data of the Open Inference Protocol's tensors: datatypes, and their binary form (Triton's binary tensor data)."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

from medusa_handler.contract import HttpError
from medusa_runtime.errors import json_excerpt

BINARY_LENGTH = "Inference-Header-Content-Length"  # how many bytes of a body are its JSON
_MOST_BINARY = 1 << 20  # elements of a request


def _ints(least: int, most: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _floats(limit: float) -> Callable[[object], bool]:
    """Take what rounds to a finite number of the type, which whatever is below ``limit`` does."""
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and -limit < value < limit


# By datatype, a function that says whether a value of JSON can be an element.
DATATYPES: dict[str, Callable[[object], bool]] = {
    "BOOL": lambda value: isinstance(value, bool),
    **{f"UINT{bits}": _ints(0, (1 << bits) - 1) for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": _ints(-1 << (bits - 1), (1 << (bits - 1)) - 1) for bits in (8, 16, 32, 64)},
    "FP16": _floats((2 - 2**-11) * 2**15),
    "BF16": _floats((2 - 2**-8) * 2**127),
    "FP32": _floats((2 - 2**-24) * 2**127),
    "FP64": _floats(math.inf),
    "BYTES": lambda value: isinstance(value, str),
}

_FORMS = {
    "BOOL": "?",
    **dict(zip((f"UINT{bits}" for bits in (8, 16, 32, 64)), "BHIQ", strict=True)),
    **dict(zip((f"INT{bits}" for bits in (8, 16, 32, 64)), "bhiq", strict=True)),
    "FP16": "e",
    "BF16": "f",  # the upper half of it
    "FP32": "f",
    "FP64": "d",
}  # of the package struct


def wrong(field: str, expected: str, found: Any) -> HttpError:
    """Return the answer to a field that does not hold what is expected."""
    return HttpError(400, f"{field}: expected {expected}, found {json_excerpt(found)}")


class BinaryData:
    """The tensors in binary form behind a body's JSON, one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._left = _MOST_BINARY  # fewer elements than in JSON, for whose values memory is reserved

    def take(self, kind: str, size: object, count: int, place: str) -> list[Any]:
        """Return the ``count`` elements of the next tensor, which has ``size`` bytes. Raises HttpError 400."""
        place = f"{place}.parameters.binary_data_size"
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(self._data):
            raise wrong(place, f"a number from 0 to {len(self._data)}, the bytes that are left", size)
        if kind != "BYTES" and size != count * _width(kind):
            raise wrong(place, f"{count} elements of {_width(kind)} bytes", size)
        if count > self._left:
            raise HttpError(400, f"expected at most {_MOST_BINARY} elements in binary form, found more")
        self._left -= count
        data, self._data = bytes(self._data[:size]), self._data[size:]
        return _texts(data, count, place) if kind == "BYTES" else _numbers(kind, data)

    def check_end(self) -> None:
        """Raise HttpError 400 if bytes are left."""
        if self._data:
            raise HttpError(400, f"expected tensors for all of the body, found {len(self._data)} bytes behind them")


def pack(kind: str, elements: Sequence[Any]) -> bytes:
    """Return elements in binary form: texts as UTF-8 or bytes, each behind its length in four bytes."""
    if kind == "BYTES":
        texts = (each if isinstance(each, bytes) else each.encode() for each in elements)
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    packed = struct.pack(f"<{len(elements)}{_FORMS[kind]}", *elements)
    if kind != "BF16":
        return packed
    halves = bytearray(len(packed) // 2)
    halves[::2], halves[1::2] = packed[2::4], packed[3::4]
    return bytes(halves)


def _width(kind: str) -> int:
    return 2 if kind == "BF16" else struct.calcsize(_FORMS[kind])


def _numbers(kind: str, data: bytes) -> list[Any]:
    if kind == "BF16":
        whole = bytearray(2 * len(data))
        whole[2::4], whole[3::4] = data[::2], data[1::2]
        data = bytes(whole)
    return list(struct.unpack(f"<{len(data) // struct.calcsize(_FORMS[kind])}{_FORMS[kind]}", data))


def _texts(data: bytes, count: int, place: str) -> list[str]:
    found: list[str] = []
    at = 0
    while at < len(data) and len(found) < count:
        start, at = at + 4, at + 4 + int.from_bytes(data[at : at + 4], "little")
        if max(start, at) > len(data):
            raise HttpError(400, f"{place}: expected texts behind their lengths, found a longer one")
        try:
            found.append(data[start:at].decode())
        except UnicodeDecodeError:
            raise HttpError(400, f"{place}: expected UTF-8, found other bytes in text {len(found)}") from None
    if at < len(data) or len(found) < count:
        more = "more" if at < len(data) else len(found)
        raise HttpError(400, f"{place}: expected {count} texts for the shape, found {more}")
    return found


__all__ = ["BINARY_LENGTH", "DATATYPES", "BinaryData", "pack", "wrong"]
