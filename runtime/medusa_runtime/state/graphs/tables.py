"""Tables of a graph: sequences of rows that stay packed, as they are in a file, until a row is read.

Compiled code (kernels/source/graphs.c) takes them as they are. A restore reads no row in Python, for there are tens of
thousands.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

from .blueprint import Edge, Node, Relocation

Row = TypeVar("Row", Node, Edge, Relocation)


class _Table(Sequence[Row], Generic[Row]):
    """A sequence that is equal to any other of the same rows."""

    ROW: ClassVar[struct.Struct]

    def __init__(self, data: bytes) -> None:
        """Raises ValueError if the bytes are not a number of whole rows."""
        if len(data) % self.ROW.size:
            raise ValueError(f"expected rows of {self.ROW.size} bytes, found {len(data)} bytes")
        self.data = data

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        """Return these rows packed. Raises struct.error if a number does not fit."""
        return rows if type(rows) is cls else cls(b"".join(map(cls._pack, rows)))

    def __len__(self) -> int:
        return len(self.data) // self.ROW.size

    def __iter__(self) -> Iterator[Row]:
        return map(self._row, self.ROW.iter_unpack(self.data))

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return tuple(self)[index]
        number = range(len(self))[index]
        return self._row(self.ROW.unpack_from(self.data, number * self.ROW.size))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, type(self)):
            return self.data == other.data
        return isinstance(other, Sequence) and len(other) == len(self) and all(map(_equal, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        rows = ", ".join(map(repr, islice(self, 3)))
        return f"{type(self).__name__}({rows}{', …' if len(self) > 3 else ''})"

    @staticmethod
    def _pack(row: Row) -> bytes:
        raise NotImplementedError

    @staticmethod
    def _row(values: tuple[Any, ...]) -> Row:
        raise NotImplementedError


def _equal(one: object, other: object) -> bool:
    return one == other


class NodeTable(_Table[Node]):
    ROW = struct.Struct("<HHi3I3IIII")

    @staticmethod
    def _pack(row: Node) -> bytes:
        kind, attributes, kernel, grid, block, *rest = row
        return NodeTable.ROW.pack(kind, attributes, kernel, *grid, *block, *rest)

    @staticmethod
    def _row(values: tuple[Any, ...]) -> Node:
        kind, attributes, kernel, *dims = values
        return Node(kind, attributes, kernel, (dims[0], dims[1], dims[2]), (dims[3], dims[4], dims[5]), *dims[6:])


class EdgeTable(_Table[Edge]):
    ROW = struct.Struct("<II8s")

    @staticmethod
    def _pack(row: Edge) -> bytes:
        return EdgeTable.ROW.pack(*row)

    @staticmethod
    def _row(values: tuple[Any, ...]) -> Edge:
        return Edge(*values)


class RelocationTable(_Table[Relocation]):
    ROW = struct.Struct("<IIQQ")

    @staticmethod
    def _pack(row: Relocation) -> bytes:
        return RelocationTable.ROW.pack(*row)

    @staticmethod
    def _row(values: tuple[Any, ...]) -> Relocation:
        position, memory_range, offset, is_map = values
        return Relocation(position, memory_range, offset, bool(is_map))


__all__ = ["EdgeTable", "NodeTable", "RelocationTable"]
