"""Read a GGUF file as the checkpoint that transformers has of the same model: its index and its small files."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from ...errors import ConfigError, CorruptError, short_repr
from ..header import HeaderEntry
from ..index import Shard, TensorEntry, WeightIndex
from .architectures import ROPE_FACTORS, architecture
from .config import config, pooling_files
from .header import GgufHeader, Read
from .metadata import Metadata
from .tokenizer import tokenizer_files

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_MOST_PARTS = 1000
_MOST_FACTORS = 1024

Opened = tuple[Shard, GgufHeader, Read]


class GgufReader:
    """Reads the headers of a model's file or files. ``index`` has the tensors under transformers' names.

    ``first`` is what has been read of the only file, or of the first of several; ``read_header`` reads the others'
    headers in ``pool``. Raises CorruptError, ConfigError and ModelError, and what ``read_header`` raises.
    """

    def __init__(self, first: Opened, read_header: Callable[[str], Opened], pool: ThreadPoolExecutor) -> None:
        self._name = name = first[0].name
        self._header = first[1]
        others = [pool.submit(read_header, other) for other in self._other_parts()]
        parts = [first, *(future.result() for future in others)]
        metadata = Metadata(name, self._header.metadata)
        found = architecture(metadata)
        stored: dict[str, HeaderEntry] = {}
        factors: dict[str, tuple[float, ...]] = {}
        headers: list[dict[str, TensorEntry]] = []
        for _, header, read in parts:
            tensors = dict(header.tensors)
            for tensor in ROPE_FACTORS.keys() & tensors.keys():
                numbers = self._factors(tensor, tensors.pop(tensor), header.data_start, read)
                factors |= dict.fromkeys(ROPE_FACTORS[tensor], numbers)
            stored |= tensors
            headers.append(found.entries(tensors))
        self._config = config(metadata, found, stored, factors)
        self._pooling = pooling_files(metadata)
        self.index = WeightIndex.from_headers([shard for shard, _, _ in parts], headers)

    def files(self, beside: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the small files. Those ``beside`` replace the file's own, with a tokenizer.json all of its tokenizer.

        Raises ConfigError for a tokenizer of a kind that is not known.
        """
        own = tokenizer_files(self._name, self._header.metadata) if "tokenizer.json" not in beside else {}
        return {"config.json": json.dumps(self._config).encode()} | self._pooling | own | dict(beside)

    def _other_parts(self) -> list[str]:
        """Return the names of the other parts of a split file."""
        metadata = self._header.metadata
        count, number = metadata.get("split.count", 1), metadata.get("split.no", 0)
        if type(count) is not int or not 0 <= count <= _MOST_PARTS or type(number) is not int:
            raise CorruptError(f"{self._name}: expected at most {_MOST_PARTS} parts, found {short_repr(count)}")
        if count <= 1:
            return []
        named = _PART.search(self._name)
        if named is None or int(named[2]) != count:
            raise ConfigError(
                f"{self._name}: this is one of {count} parts: expected a name that ends with "
                f"-00001-of-{count:05}.gguf, which llama.cpp gives to the first"
            )
        stem = self._name[: named.start()]
        names = [f"{stem}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)]
        if number != 0 or names[0] != self._name:
            raise ConfigError(f"{self._name}: this is not the first of {count} parts: expected {names[0]}")
        return names[1:]

    def _factors(self, tensor: str, entry: HeaderEntry, data_start: int, read: Read) -> tuple[float, ...]:
        count = (entry.stop - entry.start) // 4
        if entry.dtype != "F32" or len(entry.shape) != 1 or not 0 < count <= _MOST_FACTORS:
            raise CorruptError(
                f"{self._name}: expected {tensor} to have at most {_MOST_FACTORS} numbers in F32, found "
                f"{list(entry.shape)} in {entry.dtype}"
            )
        text = read(data_start + entry.start, data_start + entry.stop)
        if len(text) != 4 * count:
            raise CorruptError(f"{self._name}: truncated: {tensor} is cut short; fetch the file again")
        return struct.unpack(f"<{count}f", text)


__all__ = ["GgufReader"]
