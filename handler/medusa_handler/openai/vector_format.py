"""The forms in which an answer has vectors: numbers, base64, or plain bytes, as in vLLM."""

from __future__ import annotations

import base64
import math
import struct
import sys
from array import array
from typing import Any, NamedTuple

from ..faults import invalid
from ..model.embeddings import floats
from .body.parameters import Body

_ENCODINGS = ("float", "base64", "bytes", "bytes_only")
_DTYPES = ("float32", "float16", "bfloat16")
_ORDERS = ("native", "little", "big")
_LEAST_INFINITE_HALF = 65520.0  # is rounded to infinity in float16


class VectorFormat(NamedTuple):
    """How vectors are written. ``dtype`` and ``order`` count for all encodings but ``float``."""

    encoding: str
    dtype: str
    order: str

    @classmethod
    def parse(cls, body: Body) -> VectorFormat:
        """Read a body's format. Raises ApiError 400."""
        return cls(
            _one_of(body, "encoding_format", _ENCODINGS),
            _one_of(body, "embed_dtype", _DTYPES),
            _one_of(body, "endianness", _ORDERS),
        )

    @property
    def is_bytes(self) -> bool:
        """True if the answer consists of bytes instead of JSON."""
        return self.encoding.startswith("bytes")

    def value(self, data: bytes) -> str | list[float]:
        """Return a vector (float32, little-endian) as JSON has it."""
        return floats(data) if self.encoding == "float" else base64.b64encode(self.packed(data)).decode()

    def packed(self, data: bytes) -> bytes:
        """Return a vector (float32, little-endian) as bytes of the format."""
        if self.dtype == "float16":
            numbers = [n if abs(n) < _LEAST_INFINITE_HALF else math.copysign(math.inf, n) for n in floats(data)]
            return struct.pack(f"{'>' if self._is_swapped else '<'}{len(numbers)}e", *numbers)
        words = array("I" if self.dtype == "float32" else "H")
        if self.dtype == "float32":
            words.frombytes(data)
        else:  # the upper half, rounded to the nearest, and to even between two
            words.extend((word + 0x7FFF + ((word >> 16) & 1)) >> 16 for word in array("I", data))
        if self._is_swapped:
            words.byteswap()
        return words.tobytes()

    @property
    def _is_swapped(self) -> bool:
        return self.order not in ("native", sys.byteorder)


def _one_of(body: Body, name: str, known: tuple[str, ...]) -> str:
    value: Any = body.get(name)
    if value is None:
        return known[0]
    if value not in known:
        raise invalid(name, f"{', '.join(known[:-1])} or {known[-1]}", value)
    return str(value)


__all__ = ["VectorFormat"]
