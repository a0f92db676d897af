"""Fat binaries: cubins for several architectures, compressed, in the sections of CUDA libraries."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ....errors import MissingPackageError, StateError

MAGIC = 0xBA55ED50
SECTIONS = (".nv_fatbin", ".cask_resource")
_HEADER = struct.Struct("<IHHQ")
_ZSTD = b"\x28\xb5\x2f\xfd"
_ELF_KIND = 2
_LARGEST_CUBIN_BYTES = 1 << 28

Buffer = bytes | mmap.mmap


class FatbinEntry(NamedTuple):
    """One image in a fat binary. ``start``, ``stored_bytes``: its payload; ``cubin``: not PTX."""

    cubin: bool
    arch: int
    start: int
    stored_bytes: int
    unpacked_bytes: int


class Fatbin(NamedTuple):
    start: int
    size: int
    entries: tuple[FatbinEntry, ...]


def parse_fatbins(data: Buffer, start: int = 0, stop: int | None = None) -> Iterator[Fatbin]:
    """The fat binaries that lie one after the other in a range. StateError where one is cut or damaged."""
    stop = len(data) if stop is None else stop
    at = start
    while at + _HEADER.size <= stop:
        magic, _, header, size = _HEADER.unpack_from(data, at)
        if magic != MAGIC:
            at += 8
            continue
        if at + header + size > stop:
            raise StateError(f"expected a whole fat binary of {header + size:,} bytes, found {stop - at:,}")
        yield Fatbin(at, header + size, tuple(_entries(data, at + header, at + header + size)))
        at = (at + header + size + 7) & ~7


def _entries(data: Buffer, at: int, stop: int) -> Iterator[FatbinEntry]:
    while at < stop:
        if at + 64 > stop:
            raise StateError(f"expected the header of an image in a fat binary, found {stop - at} bytes")
        kind, _, header, padded = struct.unpack_from("<HHIQ", data, at)
        packed, arch, unpacked = (
            struct.unpack_from("<I", data, at + 16)[0],
            struct.unpack_from("<I", data, at + 28)[0],
            struct.unpack_from("<Q", data, at + 56)[0],
        )
        if header < 64 or at + header + padded > stop or packed > padded:
            raise StateError(f"an image in a fat binary ends beyond it, at {at + header + padded:,} of {stop:,}")
        yield FatbinEntry(kind == _ELF_KIND, arch, at + header, packed or padded, unpacked)
        at += header + padded


def unpack(data: Buffer, entry: FatbinEntry) -> bytes:
    """The cubin or PTX itself. StateError when damaged, MissingPackageError without a package for zstd."""
    stored = bytes(data[entry.start : entry.start + entry.stored_bytes])
    if entry.cubin and stored[:4] not in (_ZSTD, b"\x7fELF"):
        raise StateError(f"expected a cubin, plain or compressed by CUDA 12.8 or newer, found {stored[:4]!r}")
    if stored[:4] != _ZSTD:
        return stored
    try:
        import zstandard
    except ImportError:
        raise MissingPackageError("reading CUDA libraries needs zstandard: pip install zstandard") from None
    try:
        limit = entry.unpacked_bytes or _LARGEST_CUBIN_BYTES
        return bytes(zstandard.ZstdDecompressor().decompress(stored, max_output_size=min(limit, _LARGEST_CUBIN_BYTES)))
    except zstandard.ZstdError as error:
        raise StateError(f"an image in a fat binary cannot be unpacked: {error}") from None


def library_fatbins(path: Path) -> Iterator[tuple[mmap.mmap, Fatbin]]:
    """The fat binaries of a shared library; the map is valid until the iterator is done."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for start, size in _fatbin_sections(data, path):
            for fatbin in parse_fatbins(data, start, start + size):
                yield data, fatbin


def _fatbin_sections(data: mmap.mmap, path: Path) -> list[tuple[int, int]]:
    if data[:4] != b"\x7fELF":
        raise StateError(f"expected a shared library, found {path.name} starting with {data[:4]!r}")
    try:
        (table,) = struct.unpack_from("<Q", data, 0x28)
        stride, count, names = struct.unpack_from("<HHH", data, 0x3A)
        headers = [struct.unpack_from("<IIQQQQ", data, table + i * stride) for i in range(count)]
        found = []
        for header in headers:
            at = headers[names][4] + header[0]
            name = bytes(data[at : data.find(b"\0", at)]).decode(errors="replace")
            if name in SECTIONS and header[1] != 8:
                found.append((header[4], header[5]))
    except (struct.error, IndexError, OverflowError) as error:
        raise StateError(f"{path.name} is cut or damaged: {error}") from None
    return found
