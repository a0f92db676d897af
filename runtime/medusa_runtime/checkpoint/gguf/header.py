"""Parse and check the header of a GGUF file: its metadata, and where its tensors lie.

Source: the GGUF specification (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). A file has a magic, a
version and two counts; key-value pairs; a description of each tensor; and, aligned, the data section. Nothing says how
long the header is, so it is parsed while it is read. The file is not trusted: the numbers of values and tensors and the
length of the header are bounded, and every tensor's bytes must lie within the file.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from ...errors import CorruptError, ModelError, short_repr
from ...imports.gc_paused import gc_paused
from ..header import MOST_TENSORS, HeaderEntry, too_many_tensors
from .blocks import BLOCKS
from .packed_strings import CUT_SHORT, PackedStrings, gather_strings

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # the first version had counts of 32 bits, and was used for weeks
MAX_HEADER_BYTES = 100_000_000
_SECOND_BYTES = 4 << 20  # the least that is known after a second read: a vocabulary and its merges take 1 to 20 MB
_MOST_VALUES = 5_000_000
_MOST_KEYS = 10_000
_MOST_NAME_BYTES = 1024
_MOST_DIMENSIONS = 4  # ggml's own limit
_ALIGNMENT, _MOST_ALIGNMENT = 32, 1 << 20

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _LIST = 8, 9
_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip
_PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I8": 1, "I16": 2, "I32": 4, "I64": 8}

Read = Callable[[int, int], bytes]  # bytes [start, stop) of the file


class GgufHeader(NamedTuple):
    """The header of a file whose data section starts at byte ``data_start``.

    ``tensors`` has shapes as torch has them, [out, in], and dtypes as safetensors names them, or those of ``BLOCKS``.
    """

    metadata: dict[str, Any]
    tensors: dict[str, HeaderEntry]
    data_start: int


@gc_paused()  # the collector would look through the vocabulary again and again
def read_header(name: str, size_bytes: int, head: bytes, read: Read) -> GgufHeader:
    """Read the header of a file of ``size_bytes``; ``head`` are its first bytes, and ``read`` brings more of them.

    Raises CorruptError, which names the file and the key or tensor, and ModelError for a type that is not supported.
    """
    cursor = _Cursor(name, size_bytes, head, read)
    if cursor.take(len(MAGIC)) != MAGIC:
        raise CorruptError(f"{name}: expected a GGUF file, found one that starts with {head[:8]!r}; fetch it again")
    version, tensors, keys = cursor.unpack("<IQQ")
    if version not in VERSIONS:
        raise CorruptError(
            f"{name}: expected version 2 or 3 of GGUF in little-endian order, found {version}; convert the model again"
        )
    if tensors > MOST_TENSORS:
        raise too_many_tensors(name, tensors)
    if keys > _MOST_KEYS:
        raise CorruptError(f"{name}: expected at most {_MOST_KEYS} keys of metadata, found {keys}")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = cursor.name("a key")
        if key in metadata:
            raise CorruptError(f"{name}: has the key {short_repr(key)} twice, expected once")
        metadata[key] = cursor.value(key)
    found = [_tensor(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
        raise CorruptError(f"{name}: expected general.alignment to be a power of two, found {short_repr(alignment)}")
    data_start = -(-cursor.position // alignment) * alignment
    return GgufHeader(metadata, _checked(name, found, alignment, max(size_bytes - data_start, 0)), data_start)


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    size_bytes: int


def _tensor(cursor: _Cursor) -> _Tensor:
    tensor = cursor.name("a tensor's name")
    what = f"{cursor.file}: tensor {short_repr(tensor)}"
    (dimensions,) = cursor.unpack("<I")
    if dimensions > _MOST_DIMENSIONS:
        raise CorruptError(f"{what}: expected at most {_MOST_DIMENSIONS} dimensions, found {dimensions}")
    sizes = cursor.unpack(f"<{dimensions}Q")
    if not all(sizes):
        raise CorruptError(f"{what}: expected sizes above 0, found {list(sizes)}")
    number, start = cursor.unpack("<IQ")
    kind = _TYPES.get(number, f"type {number}")
    if kind in BLOCKS:
        block = BLOCKS[kind]
        if not sizes or sizes[0] % block.values:
            raise CorruptError(
                f"{what}: expected rows of whole blocks of {block.values} values in {kind}, found the sizes {sizes}"
            )
        size_bytes = math.prod(sizes) // block.values * block.size_bytes
    elif kind in _PLAIN_BYTES:
        size_bytes = math.prod(sizes) * _PLAIN_BYTES[kind]
    else:
        raise ModelError(
            f"{what}: its weights are stored as {kind}, which the torch engine does not read; expected one of "
            f"{', '.join([*[*_PLAIN_BYTES][:3], *BLOCKS])}, such as a Q4_K_M or Q8_0 file of the same model"
        )
    return _Tensor(tensor, sizes[::-1], kind, start, size_bytes)


def _checked(name: str, tensors: list[_Tensor], alignment: int, data_bytes: int) -> dict[str, HeaderEntry]:
    """Return the entries of the tensors, in the order in which they lie in the file."""
    ordered = sorted(tensors, key=lambda tensor: (tensor.start, tensor.size_bytes))
    for tensor in ordered:
        if tensor.start % alignment:
            raise CorruptError(
                f"{name}: tensor {short_repr(tensor.name)} starts at byte {tensor.start} of the data, expected a "
                f"multiple of {alignment}"
            )
        if tensor.start + tensor.size_bytes > data_bytes:
            raise CorruptError(
                f"{name}: truncated: tensor {short_repr(tensor.name)} ends at byte {tensor.start + tensor.size_bytes} "
                f"of the data, but there are only {data_bytes}; fetch the file again"
            )
    for one, other in pairwise(ordered):
        if one.start + one.size_bytes > other.start:
            raise CorruptError(
                f"{name}: tensors {short_repr(one.name)} and {short_repr(other.name)} overlap at byte {other.start}"
            )
    entries = {one.name: HeaderEntry(one.start, one.start + one.size_bytes, one.kind, one.shape) for one in ordered}
    if len(entries) != len(tensors):
        raise CorruptError(f"{name}: has two tensors of one name, expected each name once")
    return entries


class _Cursor:
    """A place in a header of which only the beginning has been read. Values are little-endian."""

    def __init__(self, file: str, size_bytes: int, head: bytes, read: Read) -> None:
        self.file = file
        self.position = 0
        self._size_bytes = size_bytes
        self._data = head
        self._read = read
        self._values = 0

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        stop = self.position + count
        while stop > len(self._data):
            self._read_more(stop)
        found = self._data[self.position : stop]
        self.position = stop
        return found

    def unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def name(self, what: str) -> str:
        """Read a short string: a key, or the name of a tensor."""
        (length,) = self.unpack("<Q")
        if not 0 < length <= _MOST_NAME_BYTES:
            raise CorruptError(f"{self.file}: expected {what} of 1 to {_MOST_NAME_BYTES} bytes, found {length}")
        text = self.take(length)
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise self._not_text(what, text) from None

    def value(self, key: str) -> Any:
        """Read the value of a key: a number, a bool, a string, or a list of these."""
        (kind,) = self.unpack("<I")
        if kind == _LIST:
            inner, count = self.unpack("<IQ")
            self._count(key, count)
            return self._list(key, inner, count)
        self._count(key, 1)
        if kind == _STRING:
            return self._strings(key, 1)[0]
        return self._list(key, kind, 1)[0]

    def _list(self, key: str, kind: int, count: int) -> list[Any] | PackedStrings:
        if kind == _STRING:
            return self._strings(key, count)
        if kind not in _NUMBERS:
            raise CorruptError(
                f"{self.file}: {short_repr(key)}: expected a number, a bool, a string or a list of them, "
                f"found a value of type {kind}"
            )
        code = "B" if _NUMBERS[kind] == "?" else _NUMBERS[kind]
        values = array(code)
        values.frombytes(self.take(count * values.itemsize))
        return [bool(value) for value in values] if _NUMBERS[kind] == "?" else values.tolist()

    def _strings(self, key: str, count: int) -> list[str] | PackedStrings:
        gather = gather_strings()
        while gather is not None:
            found, end = gather(self._data, self.position, count)
            if found is not None:
                self.position = end
                return found
            if end != CUT_SHORT:
                break
            self._read_more(len(self._data) + 1)
        return self._strings_in_turn(key, count)

    def _strings_in_turn(self, key: str, count: int) -> list[str]:
        data, position = self._data, self.position
        length_at = struct.Struct("<Q").unpack_from
        found: list[str] = []
        while len(found) < count:
            start = position + 8
            if start > len(data):
                data = self._read_more(start)
                continue
            end = start + length_at(data, position)[0]
            if end > len(data):
                data = self._read_more(end)
                continue
            try:
                found.append(str(data[start:end], "utf-8"))
            except UnicodeDecodeError:
                raise self._not_text(key, data[start:end]) from None
            position = end
        self.position = position
        return found

    def _not_text(self, what: str, found: bytes) -> CorruptError:
        return CorruptError(f"{self.file}: {short_repr(what)}: expected UTF-8, found {found[:40]!r}")

    def _count(self, key: str, count: int) -> None:
        self._values += count
        if self._values > _MOST_VALUES:
            raise CorruptError(
                f"{self.file}: expected at most {_MOST_VALUES:,} values of metadata, found more at {short_repr(key)}"
            )

    def _read_more(self, stop: int) -> bytes:
        """Append to what has been read until byte ``stop`` is there, and return all of it."""
        have = len(self._data)
        if stop > min(self._size_bytes, MAX_HEADER_BYTES):
            found = f"{self._size_bytes} bytes" if stop > self._size_bytes else f"one of {stop} bytes or more"
            raise CorruptError(
                f"{self.file}: truncated or no GGUF file: expected a header of at most {MAX_HEADER_BYTES} bytes in "
                f"it, found {found}; fetch it again"
            )
        more = self._read(have, min(max(stop, 2 * have, _SECOND_BYTES), self._size_bytes, MAX_HEADER_BYTES))
        if not more:
            raise CorruptError(f"{self.file}: truncated: expected {stop} bytes or more, found {have}; fetch it again")
        self._data += more
        return self._data


__all__ = ["GgufHeader", "read_header"]
