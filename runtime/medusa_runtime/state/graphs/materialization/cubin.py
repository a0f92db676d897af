"""Read what a cubin says about its kernels. A cubin is an ELF file with a section ``.nv.info.<kernel>`` for each."""

from __future__ import annotations

import hashlib
import re
import struct
from typing import NamedTuple

from ....errors import StateError

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMTAB, _NOBITS = 2, 8
_FUNC, _OBJECT = 2, 1
# An object of an empty class takes one byte, which nothing writes. torch's images have dozens: cuda::std::ignore …
_TAG = re.compile(r"4cuda3std|6thrust|3cub|4cute")
_KERNEL = 0x10  # st_other of a __global__ function
_PARAMETER, _REGISTERS = 0x17, 0x2F


class CubinKernel(NamedTuple):
    """One kernel: the (offset, size) of each parameter in bytes, its registers, and a digest of its instructions."""

    parameters: tuple[tuple[int, int], ...]
    registers: int
    code: str


class Cubin(NamedTuple):
    """The kernels of an image, and its variables in device memory.

    ``variables`` has their sizes by name, including those in constant memory. ``initial`` has, by name, the bytes of
    variables that are not zero when the image is loaded. ``mutable_bytes`` is the size of the others, except for the
    C++ library's tags: if kernels write there, two loaded copies of the image differ.
    """

    kernels: dict[str, CubinKernel]
    variables: dict[str, int]
    initial: dict[str, bytes]
    mutable_bytes: int


def parse_cubin(data: bytes) -> Cubin:
    """Read a cubin. Raises StateError if the bytes are something else, cut or damaged."""
    try:
        return _parse(data)
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise StateError(f"expected a whole cubin, found {len(data):,} bytes that are damaged: {error}") from None


class _Section(NamedTuple):
    name: str
    kind: int
    start: int
    size: int
    link: int


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def _sections(data: bytes) -> list[_Section]:
    if data[:4] != b"\x7fELF" or len(data) < 64:
        raise StateError(f"expected a cubin (an ELF file), found {data[:4]!r}")
    if struct.unpack_from("<H", data, 18)[0] != 190:  # EM_CUDA
        raise StateError("expected a cubin, found an ELF file for another machine")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    stride, count, names = struct.unpack_from("<HHH", data, 0x3A)
    programs, (size, number) = struct.unpack_from("<Q", data, 0x20)[0], struct.unpack_from("<HH", data, 0x36)
    if number and programs + size * number > len(data):
        raise ValueError("program headers beyond the end")
    if stride != _SECTION.size:
        raise ValueError(f"section headers of {stride} bytes")
    raw = [_SECTION.unpack_from(data, table + i * stride) for i in range(count)]
    for section in raw:
        if section[1] not in (0, _NOBITS) and section[4] + section[5] > len(data):
            raise ValueError("a section beyond the end")
    return [_Section(_text(data, raw[names][4] + s[0]), s[1], s[4], s[5], s[6]) for s in raw]


def _parse(data: bytes) -> Cubin:
    sections = _sections(data)
    by_name = {section.name: section for section in sections}
    registers = _registers(data, by_name.get(".nv.info"))
    kernels: dict[str, CubinKernel] = {}
    variables: dict[str, int] = {}
    initial: dict[str, bytes] = {}
    tags = 0
    for number, (name, info, other, home, value, size) in enumerate(_symbols(data, sections)):
        if not home or home >= len(sections):
            continue
        if info & 0xF == _OBJECT and sections[home].name.startswith((".nv.global", ".nv.constant3")):
            variables[name] = size
            if sections[home].kind != _NOBITS:
                initial[name] = data[sections[home].start + value :][:size]
            elif size == 1 and _TAG.search(name):
                tags += 1
        if info & 0xF == _FUNC and other & _KERNEL:  # local ones, too: a namespace without a name has such
            parameters = _parameters(data, by_name.get(f".nv.info.{name}"))
            code = sections[home]
            digest = hashlib.sha256(data[code.start : code.start + code.size]).hexdigest()
            kernels[name] = CubinKernel(parameters, registers.get(number, 0), digest)
    zeroed = by_name.get(".nv.global")
    return Cubin(kernels, variables, initial, zeroed.size - tags if zeroed else 0)


def _symbols(data: bytes, sections: list[_Section]) -> list[tuple[str, int, int, int, int, int]]:
    found = []
    for section in sections:
        if section.kind != _SYMTAB:
            continue
        names = sections[section.link].start
        for at in range(section.start, section.start + section.size, _SYMBOL.size):
            name, info, other, home, value, size = _SYMBOL.unpack_from(data, at)
            found.append((_text(data, names + name), info, other, home, value, size))
    return found


def _records(data: bytes, section: _Section | None) -> list[tuple[int, int, int]]:
    """Return the (attribute, start, length) of each record with a payload of its own."""
    records: list[tuple[int, int, int]] = []
    if section is None:
        return records
    at, stop = section.start, section.start + section.size
    while at + 4 <= stop:
        kind, attribute, length = struct.unpack_from("<BBH", data, at)
        if kind != 4:  # its value is the two bytes themselves
            length = 0
        else:
            records.append((attribute, at + 4, length))
        at += 4 + length
    return records


def _parameters(data: bytes, section: _Section | None) -> tuple[tuple[int, int], ...]:
    found: dict[int, tuple[int, int]] = {}
    for attribute, start, length in _records(data, section):
        if attribute == _PARAMETER and length >= 12:
            _, ordinal, offset, bits = struct.unpack_from("<IHHI", data, start)
            found[ordinal] = (offset, bits >> 18)
    if sorted(found) != list(range(len(found))):
        raise ValueError(f"parameters {sorted(found)} of {section.name if section else ''}")
    return tuple(found[ordinal] for ordinal in range(len(found)))


def _registers(data: bytes, section: _Section | None) -> dict[int, int]:
    found = {}
    for attribute, start, length in _records(data, section):
        if attribute == _REGISTERS and length >= 8:
            symbol, count = struct.unpack_from("<II", data, start)
            found[symbol] = count
    return found
