"""The weight index: where each tensor of a checkpoint is, and in which order a forward pass needs them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from ..bounded_json import parse_json
from ..errors import CorruptError
from ..imports.gc_paused import gc_paused
from .gguf.blocks import BLOCKS
from .header import DTYPE_BITS, MOST_DIMENSIONS, MOST_TENSORS, HeaderEntry, too_many_tensors

PAGE_BYTES = 4096
MOST_SHARDS_BYTES = 4 << 20  # of their JSON, for ``read_shards``; ten thousand shards need 2 MB
_FORMAT = 1
_BEGINNING = re.compile(rb'\{"format":1,"recorded":(?:true|false),"shards":')  # of ``WeightIndex.to_json``


class Shard(NamedTuple):
    """One file of weights.

    ``data_start`` is the byte at which its data section starts, and ``version`` the store's version (such as an ETag).
    ``path`` is set for a file on this machine, which is mapped in place. For other files, ``offset`` is where the data
    section starts in the region's data area.
    """

    name: str
    size_bytes: int
    data_start: int
    version: str | None = None
    path: str | None = None
    offset: int = 0

    @property
    def data_bytes(self) -> int:
        return self.size_bytes - self.data_start


class TensorEntry(NamedTuple):
    """One tensor: the bytes [start, stop) of the data section of a shard, which is given by its number.

    ``dtype`` is safetensors' name for it, or that of a block format of ggml (``BLOCKS``). ``strides``, in elements, are
    given only for tensors that are not contiguous.
    """

    shard: int
    start: int
    stop: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None


def _next_page(place: int) -> int:
    """Return the first byte of a page at or behind a place."""
    return -(-place // PAGE_BYTES) * PAGE_BYTES


class WeightIndex:
    """All tensors of a checkpoint, and their execution order (ParaServe §5.1, Cicada §3).

    ``recorded`` says that the order was observed in a forward pass. Otherwise it is derived from the tensors' names,
    and a reader that has constructed the module may know a better one. Raises CorruptError for an order that does not
    name each tensor once, and for more than MOST_TENSORS.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        tensors: Mapping[str, TensorEntry],
        order: Sequence[str] | None = None,
        *,
        recorded: bool = False,
    ) -> None:
        if len(tensors) > MOST_TENSORS:
            raise too_many_tensors("the checkpoint", len(tensors))
        self.recorded = recorded
        self.shards = tuple(shards)
        self.tensors = dict(tensors)
        if order is None:
            from .order import execution_order  # here, because not needed where the index comes from a region

            order = execution_order(self.tensors)
        self.order = tuple(order)
        if sorted(self.order) != sorted(self.tensors):
            raise CorruptError("the weight index's order does not name each of its tensors once; materialize it again")

    @classmethod
    @gc_paused()
    def from_headers(
        cls, shards: Sequence[Shard], headers: Sequence[Mapping[str, HeaderEntry] | Mapping[str, TensorEntry]]
    ) -> WeightIndex:
        """Make the index of these shards, given the tensors of each one.

        The shards are placed in the region one after the other, each at the start of a page. Raises CorruptError if two
        shards hold a tensor of the same name.
        """
        return cls((), {}).with_shards(shards, headers)

    def with_shards(
        self, shards: Sequence[Shard], headers: Sequence[Mapping[str, HeaderEntry] | Mapping[str, TensorEntry]]
    ) -> WeightIndex:
        """Return the index with further shards, whose tensors are used last. Raises like ``from_headers``."""
        tensors, placed = dict(self.tensors), list(self.shards)
        offset = max((_next_page(one.offset + one.data_bytes) for one in placed if one.path is None), default=0)
        for number, (shard, header) in enumerate(zip(shards, headers, strict=True), len(placed)):
            if shard.path is None:
                shard = shard._replace(offset=offset)
                offset += _next_page(shard.data_bytes)
            placed.append(shard)
            for name, entry in header.items():
                if name in tensors:
                    other = placed[tensors[name].shard].name
                    raise CorruptError(f"tensor {name!r} is in {other} and in {shard.name}, expected in one of them")
                tensors[name] = (
                    entry._replace(shard=number) if isinstance(entry, TensorEntry) else TensorEntry(number, *entry)
                )
        if not self.tensors:
            return WeightIndex(placed, tensors)
        added = [name for name in tensors if name not in self.tensors]
        return WeightIndex(placed, tensors, [*self.order, *added])

    def reordered(self, order: Sequence[str]) -> WeightIndex:
        """Return the index in a recorded order. Names of other tensors are ignored; tensors not in it come last."""
        first = dict.fromkeys(name for name in order if name in self.tensors)
        rest = [name for name in self.order if name not in first]
        return WeightIndex(self.shards, self.tensors, [*first, *rest], recorded=True)

    @property
    def version(self) -> str:
        """A digest of the files' names, sizes and versions (such as ETags): 16 hexadecimal digits."""
        return version_of(self.shards)

    @property
    def total_bytes(self) -> int:
        """The size of all data sections."""
        return sum(shard.data_bytes for shard in self.shards)

    @cached_property
    def tensor_bytes(self) -> int:
        """The size of all tensors: less than ``total_bytes`` if the index leaves some out."""
        sizes: dict[tuple[int, int], int] = {}
        for entry in self.tensors.values():  # several may be the same bytes
            place = entry.shard, entry.start
            sizes[place] = max(sizes.get(place, 0), entry.stop - entry.start)
        return min(sum(sizes.values()), self.total_bytes)

    @cached_property
    def largest_tensor_bytes(self) -> int:
        """The size of the largest tensor."""
        return max((entry.stop - entry.start for entry in self.tensors.values()), default=0)

    @property
    def region_bytes(self) -> int:
        """The size of the region's data area, to which local files do not count."""
        return max((shard.offset + shard.data_bytes for shard in self.shards if shard.path is None), default=0)

    def stored_names(self, names: Iterable[str]) -> list[str]:
        """Return the names in the checkpoint's files of the tensors that these are, are made of or are a part of."""
        return list(names)

    def to_json(self) -> bytes:
        document = {
            "format": _FORMAT,
            "recorded": self.recorded,
            "shards": self.shards,
            "tensors": {name: self.tensors[name] for name in self.order},
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    @gc_paused()
    def from_json(cls, text: bytes | str) -> WeightIndex:
        """Read what ``to_json`` wrote. Raises CorruptError for anything else, and for bytes out of bounds."""
        try:
            document: dict[str, Any] = parse_json(text)
            if document["format"] != _FORMAT:
                raise CorruptError(f"expected a weight index of format {_FORMAT}, found {document['format']}")
            shards = [Shard(*raw) for raw in document["shards"]]
            tensors = {name: _entry(*raw) for name, raw in document["tensors"].items()}
            fits = _fits(shards, list(tensors.values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptError(
                f"expected a weight index, found something else ({str(error)[:100]}); materialize it again"
            ) from None
        if not fits:
            raise CorruptError(
                "the weight index names bytes that its shards do not have, or that its tensors do not fill; "
                "materialize it again"
            )
        return cls(shards, tensors, tuple(tensors), recorded=bool(document.get("recorded")))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeightIndex) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]


def version_of(shards: Sequence[Shard]) -> str:
    """Return ``WeightIndex.version`` of an index with these shards."""
    import hashlib

    found = sorted((shard.name, shard.size_bytes, shard.version) for shard in shards)
    return hashlib.blake2b(repr(found).encode(), digest_size=8).hexdigest()


def read_shards(text: bytes) -> tuple[Shard, ...]:
    """Read the shards from the beginning of what ``WeightIndex.to_json`` wrote, and none of the tensors.

    Half a million tensors, as a stranger's checkpoint may have, take seconds and 300 MB. ``text`` may end after
    MOST_SHARDS_BYTES. Raises CorruptError for anything else.
    """
    beginning = _BEGINNING.match(text)
    try:
        if beginning is None:
            raise ValueError("another beginning")  # noqa: TRY301
        found, _ = json.JSONDecoder().raw_decode(text[beginning.end() :].decode(errors="replace"))
        return tuple(Shard(*raw) for raw in found)
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptError(f"expected a weight index with at most 4 MiB of shards, found {str(error)[:100]}") from None


def _entry(
    shard: int, start: int, stop: int, dtype: str, shape: list[int], strides: list[int] | None = None
) -> TensorEntry:
    return TensorEntry(shard, start, stop, dtype, tuple(shape), None if strides is None else tuple(strides))


def _fits(shards: Sequence[Shard], tensors: Sequence[TensorEntry]) -> bool:
    """Return whether all fields have the right types, and each tensor lies in its shard and fills its bytes.

    Raises KeyError, TypeError or ValueError for some of those that do not.
    """
    texts = chain.from_iterable((shard.name, shard.version, shard.path) for shard in shards)
    numbers = [number for shard in shards for number in (shard.size_bytes, shard.data_start, shard.offset)]
    for entry in tensors:
        numbers += entry[:3]
        numbers += entry.shape
        numbers += entry.strides or ()
    if not set(map(type, texts)) <= {str, type(None)} or any(shard.name is None for shard in shards):
        return False
    if not set(map(type, numbers)) <= {int}:
        return False
    if numbers and not 0 <= min(numbers) <= max(numbers) < 1 << 63:
        return False
    sizes = [shard.data_bytes for shard in shards]
    return min(sizes, default=0) >= 0 and all(_is_inside(entry, sizes) for entry in tensors)


def _is_inside(entry: TensorEntry, sizes: Sequence[int]) -> bool:
    shard, start, stop, dtype, shape, strides = entry
    if shard >= len(sizes) or start > stop or stop > sizes[shard] or len(shape) > MOST_DIMENSIONS:
        return False
    elements = math.prod(shape)
    if strides is not None and elements:
        elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if dtype in BLOCKS:
        values, size_bytes = BLOCKS[dtype]
        has_whole_blocks = strides is None and bool(shape) and shape[-1] % values == 0
        return has_whole_blocks and elements // values * size_bytes == stop - start
    return elements * DTYPE_BITS[dtype] == (stop - start) * 8


__all__ = ["MOST_SHARDS_BYTES", "Shard", "TensorEntry", "WeightIndex", "read_shards", "version_of"]
