"""Gather the strings of a header in compiled code (``kernels/source/strings.c``).

A vocabulary and its merges are half a million strings. Python needs a third of a second for them, and a fetch waits.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from ...compiled_library import LIBRARY

CUT_SHORT = -2  # the strings do not end in the data; any other negative number: Python has to read them
_LENGTH_BYTES = 8

Gather = Callable[[bytes, int, int], tuple[list[str] | None, int]]


@functools.cache
def gather_strings() -> Gather | None:
    """Return the function that reads ``count`` strings from byte ``start`` of ``data``, or None without the library.

    It returns them and the byte behind the last one, or None and a negative number.
    """
    try:
        compiled: Any = ctypes.CDLL(str(LIBRARY)).medusa_gather_strings
    except (OSError, AttributeError):
        return None
    compiled.argtypes = [ctypes.c_char_p, *[ctypes.c_long] * 3, ctypes.c_void_p]
    compiled.restype = ctypes.c_long

    def gather(data: bytes, start: int, count: int) -> tuple[list[str] | None, int]:
        out = bytearray(max(len(data) - start, 1))
        end = compiled(data, start, len(data), count, (ctypes.c_uint8 * len(out)).from_buffer(out))
        if end < 0:
            return None, end
        try:
            text = str(memoryview(out)[: end - start - (_LENGTH_BYTES - 1) * count], "utf-8")
        except UnicodeDecodeError:
            return None, -1
        return text.split("\0")[:-1], end

    return gather


__all__ = ["CUT_SHORT", "Gather", "gather_strings"]
