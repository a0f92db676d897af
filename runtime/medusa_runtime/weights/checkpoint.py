"""What must be read of a checkpoint before its weights: the headers, and the small files beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import urlsplit, urlunsplit

from ..errors import CorruptError, ForbiddenError, ObjectNotFoundError
from ..storage.base import ObjectInfo, Store, open_store, redacted, scheme_of
from .archive import SUFFIXES, read_archive
from .header import PREFIX_BYTES, HeaderEntry, header_bytes, parse_header
from .index import Shard, WeightIndex

SINGLE, SHARDED, ARCHIVE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "preprocessor_config.json",
    "processor_config.json",
)
_GUESS_BYTES = 256 << 10  # holds the header of most checkpoints
_MOST_SMALL_BYTES = 64 << 20
_THREADS = 8


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An indexed checkpoint. ``files``: the small ones that exist; ``sharded``: whether an index.json names shards."""

    store: Store
    index: WeightIndex
    files: dict[str, bytes]
    sharded: bool


def open_checkpoint(url: str) -> Checkpoint:
    """Index the checkpoint in a folder, or the one safetensors or PyTorch file, that ``url`` names.

    Everything is asked for at the same time, the weights' header first. Raises the store's errors, and CorruptError.
    """
    folder, name = split(url)
    store = open_store(folder)
    try:
        with ThreadPoolExecutor(_THREADS, "index") as pool:
            return _Reader(store, pool).read(name)
    except BaseException:
        store.close()
        raise


def split(url: str) -> tuple[str, str | None]:
    """The folder, and the file's name where ``url`` is one file of weights."""
    suffixes = (".safetensors", *SUFFIXES)
    if not scheme_of(url):
        if not url.endswith(suffixes) or os.path.isdir(url):
            return url, None
        path = PurePosixPath(url)
        return str(path.parent), path.name
    parts = urlsplit(url)
    if not parts.path.endswith(suffixes):
        return url, None
    parent, _, name = parts.path.rpartition("/")
    return urlunsplit(parts._replace(path=parent or "/")), name


class _Reader:
    def __init__(self, store: Store, pool: ThreadPoolExecutor) -> None:
        self._store = store
        self._pool = pool

    def read(self, name: str | None) -> Checkpoint:
        if name is not None and name.endswith(SUFFIXES):
            index = self._archive(name)
            config = self._small(SMALL_FILES[0])
            return Checkpoint(self._store, index, {} if config is None else {SMALL_FILES[0]: config}, sharded=False)
        single = self._pool.submit(self._header, name or SINGLE)
        sharded = None if name else self._pool.submit(self._small, SHARDED)
        small = {key: self._pool.submit(self._small, key) for key in SMALL_FILES}
        try:
            index, names = self._index(single, sharded)
        except BaseException:
            for future in small.values():
                future.cancel()
            raise
        files = {key: body for key, future in small.items() if (body := future.result()) is not None}
        if names is not None:
            files[SHARDED] = names
        return Checkpoint(self._store, index, files, names is not None)

    def _index(
        self, single: Future[tuple[Shard, dict[str, HeaderEntry]]], sharded: Future[bytes | None] | None
    ) -> tuple[WeightIndex, bytes | None]:
        """From the single file if there is one, as transformers does it, else from the shards."""
        try:
            shard, entries = single.result()
        except (ObjectNotFoundError, ForbiddenError) as error:
            names = sharded.result() if sharded else None
            if names is not None:
                return self._sharded(names), names
            if sharded is None or isinstance(error, ForbiddenError):
                raise
            try:
                return self._archive(ARCHIVE), None
            except ObjectNotFoundError:
                raise ObjectNotFoundError(
                    f"{redacted(self._store.url)}: expected {SINGLE}, {SHARDED} or {ARCHIVE}, found none of them "
                    f"({error})"
                ) from None
        return WeightIndex.from_headers([shard], [entries]), None

    def _sharded(self, text: bytes) -> WeightIndex:
        wanted = weight_map(text)
        names = sorted(set(wanted.values()))
        futures = [self._pool.submit(self._header, name) for name in names]
        read = []
        for name, future in zip(names, futures, strict=True):
            try:
                read.append(future.result())
            except ObjectNotFoundError as error:
                raise ObjectNotFoundError(f"{SHARDED} names the shard {name}, which is missing: {error}") from None
        index = WeightIndex.from_headers([shard for shard, _ in read], [entries for _, entries in read])
        for tensor, name in wanted.items():
            entry = index.tensors.get(tensor)
            if entry is None or index.shards[entry.shard].name != name:
                found = "in none" if entry is None else f"in {index.shards[entry.shard].name}"
                raise CorruptError(f"{SHARDED} says that tensor {tensor!r} is in {name}, found it {found}")
        return index

    def _header(self, name: str) -> tuple[Shard, dict[str, HeaderEntry]]:
        head, info = self._store.read(name, 0, _GUESS_BYTES)
        data_start = header_bytes(name, head, info.size)
        if data_start > len(head):
            rest, _ = self._store.read(name, len(head), data_start, info.version)
            head += rest
        if len(head) < data_start:
            raise CorruptError(f"{name}: truncated: expected {data_start} bytes of header, found {len(head)}")
        entries = parse_header(name, head[PREFIX_BYTES:data_start], info.size - data_start)
        path = self._store.local_path(name)
        return Shard(name, info.size, data_start, info.version, str(path) if path else None), entries

    def _archive(self, name: str) -> WeightIndex:
        head, info = self._store.read(name, 0, PREFIX_BYTES + 512)

        def read(start: int, stop: int) -> bytes:
            return self._store.read(name, start, stop, info.version)[0]

        tensors = read_archive(name, info.size, head, read)
        path = self._store.local_path(name)
        return WeightIndex([Shard(name, info.size, 0, info.version, str(path) if path else None)], tensors)

    def _small(self, name: str) -> bytes | None:
        """A small file, or None. Some stores forbid instead of saying that there is no such object."""
        try:
            return read_whole(self._store.read, name)
        except (ObjectNotFoundError, ForbiddenError):
            return None


def read_whole(read: Callable[[str, int, int, str | None], tuple[bytes, ObjectInfo]], name: str) -> bytes:
    data, info = read(name, 0, _GUESS_BYTES, None)
    if info.size > _MOST_SMALL_BYTES:
        raise CorruptError(f"{name}: expected a small file, found {info.size} bytes")
    while len(data) < info.size:
        more, _ = read(name, len(data), info.size, info.version)
        if not more:
            raise CorruptError(f"{name}: truncated: expected {info.size} bytes, found {len(data)}")
        data += more
    return data


def weight_map(text: bytes) -> dict[str, str]:
    """Tensor → shard of a model.safetensors.index.json. CorruptError when a name leaves the folder."""
    try:
        wanted = json.loads(text)["weight_map"]
        items = list(wanted.items())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CorruptError(f"{SHARDED}: expected JSON with a weight_map, found {text[:80]!r}") from None
    for tensor, name in items:
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise CorruptError(f"{SHARDED}: tensor {tensor!r}: expected a .safetensors file, found {name!r}")
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or "://" in name:
            raise CorruptError(f"{SHARDED}: {name!r} leads out of the checkpoint's folder; expected a name inside it")
    if not items:
        raise CorruptError(f"{SHARDED}: the weight_map is empty")
    return dict(items)
