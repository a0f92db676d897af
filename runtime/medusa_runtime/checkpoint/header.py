"""Parse and check the header of a safetensors file.

Source: the safetensors format (https://github.com/huggingface/safetensors). A file has a length in eight bytes
(little-endian), JSON of that length, and the data section, which the tensors cover without overlap or gap. The file is
not trusted: checking a header takes time linear in its length (sorting aside), and messages quote only the beginning of
a value.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any, NamedTuple

from ..bounded_json import TooManyValuesError, parse_json
from ..errors import CorruptError, short_repr
from ..imports.gc_paused import gc_paused

MAX_HEADER_BYTES = 100_000_000
PREFIX_BYTES = 8
MOST_TENSORS = 500_000  # of a checkpoint, five times as many as the largest have; they take seconds and 400 MB
MOST_DIMENSIONS = 64  # torch's own limit; without one, the product of a long shape could take hours
_MOST = 1 << 63

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


class HeaderEntry(NamedTuple):
    """One tensor: its bytes [start, stop) in the data section, its dtype as safetensors names it, and its shape."""

    start: int
    stop: int
    dtype: str
    shape: tuple[int, ...]


def header_bytes(name: str, prefix: bytes, file_bytes: int) -> int:
    """Return how many bytes precede the data section, given the file's first eight bytes (``prefix``) and its size.

    Raises CorruptError if this cannot be a safetensors file.
    """
    if file_bytes < PREFIX_BYTES or len(prefix) < PREFIX_BYTES:
        raise CorruptError(f"{name}: expected a safetensors file, found {file_bytes} bytes; fetch or save it again")
    if prefix.startswith(b"version "):
        raise CorruptError(f"{name}: expected a safetensors file, found a Git LFS pointer to one; run git lfs pull")
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if length > MAX_HEADER_BYTES and prefix.startswith(b"<"):
        raise CorruptError(f"{name}: expected a safetensors file, found a web page; open its address in a browser")
    if length > MAX_HEADER_BYTES:
        raise CorruptError(
            f"{name}: the header says it is {length} bytes long, expected at most {MAX_HEADER_BYTES}; "
            "this is not a safetensors file"
        )
    if PREFIX_BYTES + length > file_bytes:
        raise CorruptError(
            f"{name}: truncated: expected a header of {length} bytes, found {file_bytes} bytes; fetch it again"
        )
    return PREFIX_BYTES + length


@gc_paused()  # the collector would look through all tensors again and again, for two thirds of the time
def parse_header(name: str, text: bytes, data_bytes: int) -> dict[str, HeaderEntry]:
    """Return the tensors by name, in the order of the file.

    ``text`` is the JSON, and ``data_bytes`` the length of the data section. Raises CorruptError, which names the file
    and the tensor.
    """
    if (count := text.count(b'"data_offsets"')) > MOST_TENSORS:  # before the header is parsed, which takes seconds
        raise too_many_tensors(name, count)
    objects = _objects(name, text)
    if len(objects) > MOST_TENSORS:
        raise too_many_tensors(name, len(objects))
    entries = sorted(
        ((tensor, _entry(name, tensor, raw)) for tensor, raw in objects.items()),
        key=lambda item: (item[1].start, item[1].stop),
    )
    end, last = 0, ""
    for tensor, entry in entries:
        if entry.start < end:
            raise CorruptError(
                f"{name}: tensors {short_repr(last)} and {short_repr(tensor)} overlap at byte {entry.start}, "
                f"expected {end} or more"
            )
        if entry.start > end:
            raise CorruptError(
                f"{name}: gap of {entry.start - end} bytes in front of tensor {short_repr(tensor)}, expected none"
            )
        if entry.stop > data_bytes:
            raise CorruptError(
                f"{name}: truncated: tensor {short_repr(tensor)} ends at byte {entry.stop} of the data, "
                f"but there are only {data_bytes}; fetch the file again"
            )
        end, last = entry.stop, tensor
    if end != data_bytes:
        raise CorruptError(f"{name}: the tensors cover {end} bytes, but {data_bytes} follow the header")
    return dict(entries)


def too_many_tensors(name: str, count: int) -> CorruptError:
    """Return the error for more tensors than a checkpoint may have."""
    return CorruptError(f"{name}: expected at most {MOST_TENSORS} tensors, found {count}")


def _objects(name: str, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            _, twice = next((one, two) for one, two in pairwise(sorted(key for key, _ in pairs)) if one == two)
            raise CorruptError(f"{name}: the header names {short_repr(twice)} twice, expected once")
        return found

    try:
        header = parse_json(text.decode(), object_pairs_hook=unique)
        if b"\\u" in text:
            "".join(header).encode()  # fails for a name with half of a surrogate pair, which cannot be encoded again
    except (ValueError, RecursionError) as error:
        known = isinstance(error, json.JSONDecodeError | TooManyValuesError)
        what = str(error)[:100] if known else "not UTF-8, too deep or too long a number"
        raise CorruptError(f"{name}: the header is no JSON ({what}); this is not a safetensors file") from None
    if not isinstance(header, dict):
        raise CorruptError(f"{name}: expected a JSON object as header, found {type(header).__name__}")
    header.pop("__metadata__", None)
    return header


def _entry(name: str, tensor: str, raw: Any) -> HeaderEntry:
    try:
        dtype, shape, (start, stop) = raw["dtype"], raw["shape"], raw["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise CorruptError(
            f"{name}: tensor {short_repr(tensor)}: expected dtype, shape and two data_offsets, found {short_repr(raw)}"
        ) from None
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CorruptError(
            f"{name}: tensor {short_repr(tensor)}: unknown dtype {short_repr(dtype)}, "
            f"expected one of {', '.join(DTYPE_BITS)}"
        )
    if isinstance(shape, list) and len(shape) > MOST_DIMENSIONS:
        raise CorruptError(
            f"{name}: tensor {short_repr(tensor)}: expected at most {MOST_DIMENSIONS} dimensions, found {len(shape)}"
        )
    if not isinstance(shape, list) or not all(_is_count(size) for size in (*shape, start, stop)) or start > stop:
        raise CorruptError(
            f"{name}: tensor {short_repr(tensor)}: expected sizes of 0 or more and rising offsets, "
            f"found shape {short_repr(shape)} and offsets {short_repr([start, stop])}"
        )
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != (stop - start) * 8:
        raise CorruptError(
            f"{name}: tensor {short_repr(tensor)}: {dtype} of shape {shape} takes {short_repr(bits)} bits, "
            f"but its offsets {[start, stop]} hold {(stop - start) * 8}"
        )
    return HeaderEntry(start, stop, dtype, tuple(shape))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST
