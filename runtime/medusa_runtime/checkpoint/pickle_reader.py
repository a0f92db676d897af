"""A pickle reader for untrusted files. It makes plain values, and calls only functions that its caller allows.

Source: the opcodes in Python's ``pickletools`` that ``torch.save`` writes (protocols 2 to 5). Python's own unpickler
cannot be made safe by limiting what it may import: it hashes nested tuples, which takes exponential time or overflows
the stack, and its BUILD opcode sets attributes on any object that is allowed. Here keys are texts or numbers, BUILD
changes nothing, and no container is ever hashed, compared or printed. So time and memory are linear in the pickle's
length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

_MOST_STEPS = 2_000_000  # a tensor takes about 10 opcodes, and each element of a list beside them takes one
_UINT2, _UINT4, _UINT8 = (struct.Struct(f"<{code}").unpack_from for code in "HIQ")
_INT4, _FLOAT8 = struct.Struct("<i").unpack_from, struct.Struct(">d").unpack_from


class PickleError(Exception):
    """The pickle is broken, or holds something that this reader does not support."""


class GlobalName:
    """What stands for a global name in a pickle. ``target`` is a function that may be called, or a plain value."""

    __slots__ = ("target",)

    def __init__(self, target: Any) -> None:
        self.target = target


class PickledDict(dict[str, Any]):
    """A dict or an OrderedDict in the pickle."""


class PickleReader:
    """Reads one pickle. ``find`` returns the GlobalName of a module and a name, ``load`` the value of a persistent id.

    Their errors pass through. A value is None, a bool, int, float, str, bytes, tuple, list or PickledDict, or what
    ``load`` or the function of a GlobalName returns.
    """

    def __init__(self, data: bytes, find: Callable[[str, str], GlobalName], load: Callable[[Any], Any]) -> None:
        self._data = data
        self._at = 0
        self._find = find
        self._load = load
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each mark
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        """Return the pickle's value. Raises PickleError."""
        steps = _STEPS
        try:
            for _ in range(_MOST_STEPS):
                code = self._data[self._at]
                self._at += 1
                if code == _STOP:
                    return self._pop()
                steps[code](self)
        except KeyError:
            raise PickleError(f"opcode 0x{code:02x} or a reference of it is unknown at byte {self._at - 1}") from None
        except (IndexError, struct.error):
            raise PickleError(f"it ends or lacks a value at byte {self._at}") from None
        except (UnicodeDecodeError, TypeError, RecursionError):
            raise PickleError(f"a value of the wrong kind at byte {self._at}") from None
        raise PickleError(f"it has more than {_MOST_STEPS} steps; expected tensors and little else")

    def _pop(self) -> Any:
        return self._stack.pop()

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _uint1(self) -> int:
        value = self._data[self._at]
        self._at += 1
        return value

    def _number(self, unpack: Callable[[bytes, int], tuple[Any, ...]], size: int) -> Any:
        (value,) = unpack(self._data, self._at)
        self._at += size
        return value

    def _bytes(self, count: int) -> bytes:
        data = self._data[self._at : self._at + count]
        if len(data) < count:
            raise IndexError
        self._at += count
        return data

    def _text_line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + 512)
        if end < 0:
            raise IndexError
        return self._bytes(end + 1 - self._at)[:-1].decode()

    def _since_mark(self) -> list[Any]:
        values, self._stack = self._stack, self._below.pop()
        return values

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _protocol(self) -> None:
        if not 2 <= self._uint1() <= 5:
            raise PickleError("its protocol is not 2 to 5")

    def _global(self) -> None:
        module = self._text_line()
        self._push(self._find(module, self._text_line()))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise PickleError("a name that is not a text")
        self._push(self._find(module, name))

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, GlobalName) or not callable(function.target) or not isinstance(arguments, tuple):
            raise PickleError("a call of something that is not a function")
        if function.target is PickledDict and arguments:
            raise PickleError("an OrderedDict that is made of something")
        self._push(function.target(*arguments))

    def _build(self) -> None:
        """Drop the attributes, and leave the object as it is: those that torch gives a state dict are not tensors."""
        self._pop()
        self._stack[-1]

    def _tuple(self, count: int) -> None:
        if count > len(self._stack):
            raise IndexError
        start = len(self._stack) - count
        self._stack[start:] = [tuple(self._stack[start:])]

    def _append(self, values: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise PickleError("an element of something that is not a list")
        self._stack[-1].extend(values)

    def _set(self, pairs: list[Any]) -> None:
        """Add items to a PickledDict, but none whose key is neither a text nor a number: no tensor has such a name."""
        table = self._stack[-1]
        if not isinstance(table, PickledDict) or len(pairs) % 2:
            raise PickleError("an item of something that is not a dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if isinstance(key, str):
                table[key] = value
            elif type(key) is int and -(1 << 63) <= key < 1 << 63:
                table[str(key)] = value  # as text, because a file could choose numbers with the same hash

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]


_STOP = 0x2E
_Step = Callable[[PickleReader], None]


def _steps() -> dict[int, _Step]:
    """Return the function for each opcode."""
    r = PickleReader
    push = r._push
    return {
        0x80: r._protocol,
        0x95: lambda s: s._number(_UINT8, 8),  # FRAME
        0x28: r._mark,
        0x63: r._global,
        0x93: r._stack_global,
        0x52: r._reduce,
        0x62: r._build,
        0x51: lambda s: push(s, s._load(s._pop())),  # BINPERSID
        0x4E: lambda s: push(s, None),
        0x88: lambda s: push(s, True),
        0x89: lambda s: push(s, False),
        0x4A: lambda s: push(s, s._number(_INT4, 4)),
        0x4B: lambda s: push(s, s._uint1()),
        0x4D: lambda s: push(s, s._number(_UINT2, 2)),
        0x8A: lambda s: push(s, int.from_bytes(s._bytes(s._uint1()), "little", signed=True)),  # LONG1
        0x47: lambda s: push(s, s._number(_FLOAT8, 8)),
        0x58: lambda s: push(s, s._bytes(s._number(_UINT4, 4)).decode()),  # BINUNICODE, and its short and long forms
        0x8C: lambda s: push(s, s._bytes(s._uint1()).decode()),
        0x8D: lambda s: push(s, s._bytes(s._number(_UINT8, 8)).decode()),
        0x55: lambda s: push(s, s._bytes(s._uint1()).decode("ascii")),  # SHORT_BINSTRING, of Python 2
        0x42: lambda s: push(s, s._bytes(s._number(_UINT4, 4))),  # BINBYTES
        0x43: lambda s: push(s, s._bytes(s._uint1())),
        0x29: lambda s: push(s, ()),
        0x85: lambda s: s._tuple(1),
        0x86: lambda s: s._tuple(2),
        0x87: lambda s: s._tuple(3),
        0x74: lambda s: push(s, tuple(s._since_mark())),
        0x5D: lambda s: push(s, []),
        0x61: lambda s: s._append([s._pop()]),
        0x65: lambda s: s._append(s._since_mark()),
        0x7D: lambda s: push(s, PickledDict()),
        0x73: lambda s: s._set([s._pop(), s._pop()][::-1]),
        0x75: lambda s: s._set(s._since_mark()),
        0x8F: lambda s: push(s, []),  # EMPTY_SET: its elements are not hashed
        0x90: lambda s: s._append(s._since_mark()),
        0x71: lambda s: s._put(s._uint1()),
        0x72: lambda s: s._put(s._number(_UINT4, 4)),
        0x94: lambda s: s._put(len(s._memo)),
        0x68: lambda s: push(s, s._memo[s._uint1()]),
        0x6A: lambda s: push(s, s._memo[s._number(_UINT4, 4)]),
    }


_STEPS = _steps()
