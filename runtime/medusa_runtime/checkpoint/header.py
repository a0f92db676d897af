"""The header of a safetensors file, read and checked.

Source: the safetensors format (https://github.com/huggingface/safetensors): eight bytes little-endian length, JSON,
then the data section, which the tensors cover without overlap or gap.
"""

from __future__ import annotations

import json
from math import prod
from typing import Any, NamedTuple

from ..errors import CorruptError

MAX_HEADER_BYTES = 100_000_000
PREFIX_BYTES = 8

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


class HeaderEntry(NamedTuple):
    """One tensor: bytes [start, stop) of the data section, the dtype's safetensors name, the shape."""

    start: int
    stop: int
    dtype: str
    shape: tuple[int, ...]


def header_bytes(name: str, prefix: bytes, file_bytes: int) -> int:
    """Bytes in front of the data section, from the file's first eight bytes. CorruptError when that cannot be."""
    if file_bytes < PREFIX_BYTES or len(prefix) < PREFIX_BYTES:
        raise CorruptError(f"{name}: expected a safetensors file, found {file_bytes} bytes; fetch or save it again")
    if prefix.startswith(b"version "):
        raise CorruptError(f"{name}: expected a safetensors file, found a Git LFS pointer to one; run git lfs pull")
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
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


def parse_header(name: str, text: bytes, data_bytes: int) -> dict[str, HeaderEntry]:
    """Tensors by name, in file order. ``text`` is the JSON, ``data_bytes`` the length of what follows it.

    Raises CorruptError with one message that names the file, the tensor, what was expected and what was found.
    """
    entries = sorted(
        ((tensor, _entry(name, tensor, raw)) for tensor, raw in _objects(name, text).items()),
        key=lambda item: (item[1].start, item[1].stop),
    )
    end, last = 0, ""
    for tensor, entry in entries:
        if entry.start < end:
            raise CorruptError(
                f"{name}: tensors {last!r} and {tensor!r} overlap at byte {entry.start}, expected {end} or more"
            )
        if entry.start > end:
            raise CorruptError(f"{name}: gap of {entry.start - end} bytes in front of tensor {tensor!r}, expected none")
        if entry.stop > data_bytes:
            raise CorruptError(
                f"{name}: truncated: tensor {tensor!r} ends at byte {entry.stop} of the data, "
                f"but there are only {data_bytes}; fetch the file again"
            )
        end, last = entry.stop, tensor
    if end != data_bytes:
        raise CorruptError(f"{name}: the tensors cover {end} bytes, but {data_bytes} follow the header")
    return dict(entries)


def _objects(name: str, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise CorruptError(f"{name}: the header names {twice!r} twice, expected once")
        return found

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{name}: the header is no JSON ({error}); this is not a safetensors file") from None
    if not isinstance(header, dict):
        raise CorruptError(f"{name}: expected a JSON object as header, found {type(header).__name__}")
    header.pop("__metadata__", None)
    return header


def _entry(name: str, tensor: str, raw: Any) -> HeaderEntry:
    try:
        dtype, shape, (start, stop) = raw["dtype"], raw["shape"], raw["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise CorruptError(
            f"{name}: tensor {tensor!r}: expected dtype, shape and two data_offsets, found {str(raw)[:200]}"
        ) from None
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CorruptError(
            f"{name}: tensor {tensor!r}: unknown dtype {dtype!r}, expected one of {', '.join(DTYPE_BITS)}"
        )
    if not isinstance(shape, list) or not all(_is_count(size) for size in (*shape, start, stop)) or start > stop:
        raise CorruptError(
            f"{name}: tensor {tensor!r}: expected sizes of 0 or more and rising offsets, "
            f"found shape {shape} and offsets {[start, stop]}"
        )
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits != (stop - start) * 8:
        raise CorruptError(
            f"{name}: tensor {tensor!r}: {dtype} of shape {shape} takes {bits / 8:g} bytes, "
            f"but its offsets {[start, stop]} hold {stop - start}"
        )
    return HeaderEntry(start, stop, dtype, tuple(shape))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
