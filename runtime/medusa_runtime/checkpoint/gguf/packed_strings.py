"""Lists of strings that stay as they are in a header: a vocabulary and its merges, half a million of them.

A fetch waits for the tokenizer that is made of them, and Python would need a third of a second to make them strings.
Compiled code (``kernels/source/strings.c``) gathers them and splits tokens; without it, there are only lists.
"""

from __future__ import annotations

import ctypes
import functools
import json
import mmap
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from ...compiled_library import LIBRARY

CUT_SHORT = -2  # the strings do not end in the data; any other negative number: Python has to do it
_LENGTH_BYTES = 8
_MOST_TIMES_LARGER = 16  # of merges than of the tokens that they make. Gemma's are three times as large
_MOST_DIGITS = 24  # of a number, with the marks around it and its string
_BYTES = ctypes.c_char_p, ctypes.c_long
_MEMORY = ctypes.c_void_p, ctypes.c_long
_CONTROLS = [bytes([octet]) for octet in range(1, 32)]
_NEITHER_SPACE_NOR_END = bytes(octet for octet in range(1, 256) if octet != ord(" "))

Gather = Callable[[bytes, int, int], tuple["PackedStrings | None", int]]


class PackedStrings(Sequence[str]):
    """Strings in UTF-8, ``packed`` with a zero byte behind each."""

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    @functools.cached_property
    def strings(self) -> list[str]:
        return str(self.packed, "utf-8").split("\0")[:-1]

    def __len__(self) -> int:
        return self.packed.count(b"\0")

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        return self.strings[at]

    def __iter__(self) -> Iterator[str]:
        return iter(self.strings)

    def __repr__(self) -> str:
        return repr(self.strings)

    def numbered_as_json(self, left_out: bytes) -> bytes | None:
        """Return the strings with their numbers as a JSON object, without those where ``left_out`` has no 0.

        Returns None where Python has to do it.
        """
        write = _compiled("medusa_numbered_as_json", *_BYTES, ctypes.c_char_p, *_MEMORY)
        if write is None:
            return None
        return _written(write, 6 * len(self.packed) + _MOST_DIGITS * len(left_out) + 2, *_sized(self.packed), left_out)

    def pairs_as_json(self) -> bytes | None:
        """Return the strings as JSON. None if there is one that is not two words, as merges are."""
        packed = self.packed
        if packed.translate(None, _NEITHER_SPACE_NOR_END) != b" \0" * len(self):
            return None
        # The tokenizers package takes a line with #version for the first one of a merges.txt, but not a pair.
        begin, space, between, end = (b'["', b" ", b'","', b'"]')
        if b"#version" in packed:
            begin, space, between, end = (b'[["', b'","', b'"],["', b'"]]')
        for octet in (b"\\", b'"', *(control for control in _CONTROLS if control in packed)):
            packed = packed.replace(octet, json.dumps(octet.decode())[1:-1].encode())
        if space != b" ":
            packed = packed.replace(b" ", space)
        return b"".join((begin, packed[:-1].replace(b"\0", between), end)) if packed else b"[]"


@functools.cache
def gather_strings() -> Gather | None:
    """Return the function that reads ``count`` strings from byte ``start`` of ``data``, or None without the library.

    It returns them and the byte behind the last one, or None and a negative number.
    """
    compiled = _compiled("medusa_gather_strings", ctypes.c_char_p, *[ctypes.c_long] * 3, ctypes.c_void_p)
    if compiled is None:
        return None

    def gather(data: bytes, start: int, count: int) -> tuple[PackedStrings | None, int]:
        out = bytearray(max(len(data) - start, 1))
        end = compiled(data, start, len(data), count, (ctypes.c_uint8 * len(out)).from_buffer(out))
        if end < 0:
            return None, end
        packed = bytes(memoryview(out)[: end - start - (_LENGTH_BYTES - 1) * count])
        try:
            packed.decode()
        except UnicodeDecodeError:
            return None, -1
        return PackedStrings(packed), end

    return gather


def split_tokens(tokens: PackedStrings, numbers: Sequence[int]) -> PackedStrings | None:
    """Return each way in which a token is two others, as merges. Only the tokens of these ``numbers`` count.

    They are in the order of the numbers, and those of one token by the length of the left part. Returns None where
    Python has to find them.
    """
    split = _compiled("medusa_split_tokens", *_BYTES, ctypes.c_void_p, ctypes.c_long, *_MEMORY)
    if split is None:
        return None
    chosen = array("I", numbers)
    most = _MOST_TIMES_LARGER * len(tokens.packed)
    found = _written(split, most, *_sized(tokens.packed), chosen.buffer_info()[0], len(chosen))
    return None if found is None else PackedStrings(found)


def _compiled(name: str, *types: Any) -> Any:
    """Return a function of the library that takes ``types`` and returns a number; None without the library."""
    try:
        function = getattr(ctypes.CDLL(str(LIBRARY)), name)
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = types, ctypes.c_long
    return function


def _sized(data: bytes) -> tuple[bytes, int]:
    return data, len(data)


def _written(function: Any, capacity: int, *arguments: Any) -> bytes | None:
    """Return what a function writes, which also takes memory and its size and returns how much of it has been used.

    Returns None if the function cannot do it, or this process may not have so much memory.
    """
    try:  # its pages take no memory before they are written
        memory = mmap.mmap(-1, max(capacity, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    with memory:
        place = (ctypes.c_uint8 * len(memory)).from_buffer(memory)
        size = function(*arguments, place, capacity)
        del place
        return None if size < 0 else memory[:size]


__all__ = ["CUT_SHORT", "Gather", "PackedStrings", "gather_strings", "split_tokens"]
