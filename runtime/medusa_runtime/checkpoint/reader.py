"""Read a checkpoint's index and small files, before its weights.

The names in an index.json or a modules.json are not trusted: they must stay inside the folder, and lists are limited.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit, urlunsplit

from ..bounded_json import count_values
from ..errors import ConfigError, CorruptError, ForbiddenError, ObjectNotFoundError, UnreachableError, short_repr
from ..storage.base import BucketNotFoundError, ObjectInfo, Store, open_store, redacted, scheme_of
from ..storage.local import LocalStore
from .adapter import ADAPTER_CONFIG, ADAPTER_FILES
from .gguf.blocks import GGUF_SUFFIX
from .header import PREFIX_BYTES, HeaderEntry, header_bytes, parse_header
from .index import Shard, TensorEntry, WeightIndex

if TYPE_CHECKING:
    from .gguf.header import GgufHeader, Read

SAFETENSORS_FILE, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
ARCHIVE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")  # of the files that archive.py reads
PYTORCH_FILE, PYTORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
DIFFUSERS_FILE, DIFFUSERS_INDEX = (
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
)
SENTENCE_MODULES, SENTENCE_SETTINGS = "modules.json", "sentence_bert_config.json"  # of sentence-transformers
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
    SENTENCE_MODULES,
)
# Requested together with the header. The others are rare, and a record of the checkpoint may say which of them exist.
_FIRST_FILES = SMALL_FILES[:5]
_SHARD = re.compile(r"-\d{5}-of-\d{5}(\.\w+)$")
_GUESS_BYTES = 256 << 10  # enough for the header of most checkpoints
_PART_BYTES = 1 << 20  # of a large header, whose parts are read side by side
_MOST_SMALL_BYTES = 64 << 20
_MOST_SMALL_VALUES = 1_000_000
_MOST_SHARDS, _MOST_MODULES = 10_000, 64
_MOST_DIRECTORY_BYTES = 16 << 20  # the largest directory of a PyTorch file that is read to check a record
_THREADS = 8


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An indexed checkpoint. ``files`` holds the small files that exist, by name."""

    store: Store
    index: WeightIndex
    files: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """The recorded index of a PyTorch file.

    It is valid if the file still has this size, and its bytes from ``start`` on have this digest (SHA-256).
    """

    size_bytes: int
    start: int
    digest: str
    tensors: Mapping[str, TensorEntry]


class CheckpointRecord(Protocol):
    """A record that was made of a checkpoint earlier (in a state bundle)."""

    def begin(self, store: Store) -> None:
        """Start reading the record; ``store`` is the checkpoint's."""

    def files(self) -> Collection[str] | None:
        """Wait for the record, and return the names of the checkpoint's small files; None if there is no record."""

    def archive(self, name: str) -> ArchiveRecord | None:
        """Return the recorded index of a PyTorch file, or None. Without it, several reads must follow each other."""

    def confirms(self, index: WeightIndex, files: Mapping[str, bytes]) -> bool:
        """Return whether the record describes this checkpoint."""


def open_checkpoint(url: str, record: CheckpointRecord | None = None, store: Store | None = None) -> Checkpoint:
    """Index the checkpoint at ``url``, which is a folder, or a single safetensors, PyTorch or GGUF file.

    All requests are made at once, the weights' header first. Small files that do not exist according to ``record`` are
    not requested. ``store`` is the folder's store, if it is already open; it is closed if this function fails. Raises
    the store's errors, and CorruptError.
    """
    folder, name = split_url(url)
    store = store or open_store(folder)
    try:
        if record is not None:
            record.begin(store)
        with ThreadPoolExecutor(_THREADS, "index") as pool:
            return _Reader(store, pool, record).read(name)
    except BaseException:
        store.close()
        raise


def split_url(url: str) -> tuple[str, str | None]:
    """Split ``url`` into its folder and, if it names a single file of weights, that file's name."""
    suffixes = (".safetensors", GGUF_SUFFIX, *ARCHIVE_SUFFIXES)
    if not scheme_of(url):
        if not url.endswith(suffixes) or os.path.isdir(url):
            return url, None
        path = PurePosixPath(url)
        return str(path.parent), path.name
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"{redacted(url)}: expected a URL, found a bracket that opens no IPv6 address") from None
    if not parts.path.endswith(suffixes):
        return url, None
    parent, _, name = parts.path.rpartition("/")
    return urlunsplit(parts._replace(path=parent or "/")), name


_Entries = Mapping[str, HeaderEntry] | Mapping[str, TensorEntry]


class _Reader:
    def __init__(self, store: Store, pool: ThreadPoolExecutor, record: CheckpointRecord | None) -> None:
        self._store = store
        self._pool = pool
        self._record = record
        self._unreachable: UnreachableError | None = None

    def read(self, name: str | None) -> Checkpoint:
        if name in ADAPTER_FILES:
            beside = self._pool.submit(self._read_small, ADAPTER_CONFIG)
            return Checkpoint(self._store, self._index_single_file(name), _present({ADAPTER_CONFIG: beside.result()}))
        if name is not None and name.endswith(ARCHIVE_SUFFIXES):
            index = self._index_single_file(name)
            return Checkpoint(self._store, index, _present({SMALL_FILES[0]: self._read_small(SMALL_FILES[0])}))
        if name is not None and name.endswith(GGUF_SUFFIX):
            return self._gguf(name)
        single = self._pool.submit(self._header, name or SAFETENSORS_FILE)
        sharded = None if name else self._pool.submit(self._read_small, SAFETENSORS_INDEX)
        small = {key: self._pool.submit(self._read_small, key) for key in _FIRST_FILES}
        listed = self._record.files() if self._record else None
        left_out = [key for key in SMALL_FILES if listed is not None and key not in small and key not in listed]
        small |= {
            key: self._pool.submit(self._read_small, key) for key in SMALL_FILES if key not in (*small, *left_out)
        }
        try:
            index, names = self._index(single, sharded)
        except BaseException:
            for future in small.values():
                future.cancel()
            raise
        files = {key: body for key, future in small.items() if (body := future.result()) is not None}
        if left_out and self._record and not self._record.confirms(index, files):
            files |= {key: body for key in left_out if (body := self._read_small(key)) is not None}
        modules = files.get(SENTENCE_MODULES)
        index = self._with_dense(index, modules)
        return Checkpoint(self._store, index, files | self._module_configs(modules) | names)

    def _index_single_file(self, name: str) -> WeightIndex:
        """Index a checkpoint that is a single file."""
        shard, entries = self._archive(name) if name.endswith(ARCHIVE_SUFFIXES) else self._header(name)
        return WeightIndex.from_headers([shard], [entries])

    def _index(
        self, single: Future[tuple[Shard, _Entries]], sharded: Future[bytes | None] | None
    ) -> tuple[WeightIndex, dict[str, bytes]]:
        """Index the single file, or else the shards, as transformers does. Also return the shards' index.json."""
        try:
            shard, entries = single.result()
        except (ObjectNotFoundError, ForbiddenError) as error:
            names = sharded.result() if sharded else None
            if names is not None:
                return self._sharded(SAFETENSORS_INDEX, names), {SAFETENSORS_INDEX: names}
            if sharded is None or isinstance(error, ForbiddenError | BucketNotFoundError):
                raise
            return self._index_other_formats(error)
        return WeightIndex.from_headers([shard], [entries]), {}

    def _index_other_formats(self, missing: Exception) -> tuple[WeightIndex, dict[str, bytes]]:
        """Index one file or several shards that torch.save, diffusers or PEFT has written."""
        for single, read, several in (
            (PYTORCH_FILE, self._archive, PYTORCH_INDEX),
            (DIFFUSERS_FILE, self._header, DIFFUSERS_INDEX),
        ):
            try:
                shard, entries = read(single)
            except ObjectNotFoundError:
                names = self._read_small(several)
                if names is not None:
                    return self._sharded(several, names), {several: names}
            else:
                return WeightIndex.from_headers([shard], [entries]), {}
        for name in ADAPTER_FILES:
            try:
                return self._index_single_file(name), _present({ADAPTER_CONFIG: self._read_small(ADAPTER_CONFIG)})
            except ObjectNotFoundError:
                continue
        raise ObjectNotFoundError(
            f"{redacted(self._store.url)}: expected {SAFETENSORS_FILE}, {PYTORCH_FILE} or "
            f"{DIFFUSERS_FILE}, or the index.json of its shards, found none of them ({missing}); {self._other_names()}"
        )

    def _other_names(self) -> str:
        """Return, for a message, what a local folder has instead. Remote stores are not listed."""
        folder = self._store.local_path("") if type(self._store) is LocalStore else None
        try:
            names = sorted(entry.name for entry in folder.iterdir()) if folder is not None else []
        except OSError:
            names = []
        if gguf := [name for name in names if name.endswith(GGUF_SUFFIX)]:
            return f"to use a GGUF file, give its own address: {redacted(self._store.url).rstrip('/')}/{gguf[0]}"
        if "params.json" in names and any(name.startswith("consolidated.") for name in names):
            return "consolidated files are for Mistral's or Meta's own code: expected those for transformers"
        named = [name for name in names if name.endswith((".safetensors", *ARCHIVE_SUFFIXES))]
        if folder and (broken := [name for name in named if not (folder / name).exists()]):
            return f"{broken[0]} is a link to {os.readlink(folder / broken[0])}, which is missing: copy that, too"
        if shards := [name for name in named if _SHARD.search(name)]:
            index = _SHARD.sub(r"\1.index.json", shards[0])
            return f"there are shards, such as {shards[0]}, but not {index}, which says what they hold: copy it, too"
        if named:
            file = f"{redacted(self._store.url).rstrip('/')}/{named[0]}"
            return f"to use a file of another name, give its own address: {file}"
        if folder and (below := _folder_of_weights(folder)):
            return f"there are some in a folder of it: give its address, {below}"
        return "to use a file of another name, give its own address"

    def _sharded(self, what: str, text: bytes) -> WeightIndex:
        wanted = weight_map(what, text)
        names = sorted(set(wanted.values()))
        futures = [self._pool.submit(self._archive if what == PYTORCH_INDEX else self._header, name) for name in names]
        read = []
        for name, future in zip(names, futures, strict=True):
            try:
                read.append(future.result())
            except ObjectNotFoundError as error:
                raise ObjectNotFoundError(f"{what} names the shard {name}, which is missing: {error}") from None
        index = WeightIndex.from_headers([shard for shard, _ in read], [entries for _, entries in read])
        for tensor, name in wanted.items():
            entry = index.tensors.get(tensor)
            if entry is None or index.shards[entry.shard].name != name:
                found = "in none" if entry is None else f"in {index.shards[entry.shard].name}"
                raise CorruptError(f"{what} says that tensor {short_repr(tensor)} is in {name}, found it {found}")
        return index

    def _module_configs(self, text: bytes | None) -> dict[str, bytes]:
        """Read the files that modules.json names. Only checkpoints of sentence-transformers have one."""
        if text is None:
            return {}
        names = [SENTENCE_SETTINGS, *module_config_names(text)]
        bodies = self._pool.map(self._read_small, names)
        return {name: body for name, body in zip(names, bodies, strict=True) if body is not None}

    def _with_dense(self, index: WeightIndex, modules: bytes | None) -> WeightIndex:
        """Return the index with the layers that sentence-transformers puts behind the pooling, each in a folder."""
        paths = dense_paths(modules)
        if not paths:
            return index
        read = list(self._pool.map(self._dense, paths))
        named: list[_Entries] = []
        for path, (_, entries) in zip(paths, read, strict=True):
            named.append({f"{path}/{name}": entry for name, entry in entries.items()})  # type: ignore[arg-type]
        return index.with_shards([shard for shard, _ in read], named)

    def _dense(self, path: str) -> tuple[Shard, _Entries]:
        try:
            return self._header(f"{path}/{SAFETENSORS_FILE}")
        except ObjectNotFoundError:
            pass
        try:
            return self._archive(f"{path}/{PYTORCH_FILE}")
        except ObjectNotFoundError as error:
            raise ObjectNotFoundError(
                f"{SENTENCE_MODULES} names {path}, but there is no {path}/{SAFETENSORS_FILE} or {PYTORCH_FILE}: {error}"
            ) from None

    def _header(self, name: str) -> tuple[Shard, _Entries]:
        head, info = self._store.read(name, 0, _GUESS_BYTES)
        data_start = header_bytes(name, head, info.size)
        if data_start > len(head):
            rest, _ = self._store.read(name, len(head), data_start, info.version)
            head += rest
        if len(head) < data_start:
            raise CorruptError(f"{name}: truncated: expected {data_start} bytes of header, found {len(head)}")
        entries = parse_header(name, head[PREFIX_BYTES:data_start], info.size - data_start)
        return self._shard(name, info, data_start), entries

    def _archive(self, name: str) -> tuple[Shard, _Entries]:
        record = self._record.archive(name) if self._record else None
        if record is not None and record.size_bytes - record.start <= _MOST_DIRECTORY_BYTES:
            end, info = self._store.read(name, record.start, record.size_bytes)
            if info.size == record.size_bytes and _digest(end) == record.digest:
                return self._shard(name, info), record.tensors
        head, info = self._store.read(name, 0, PREFIX_BYTES + 512)

        def read(start: int, stop: int) -> bytes:
            return self._store.read(name, start, stop, info.version)[0]

        from .archive import read_archive  # here, because most checkpoints need no such import

        return self._shard(name, info), read_archive(name, info.size, head, read)

    def _gguf(self, name: str) -> Checkpoint:
        """Index a GGUF file, and the other parts of a split one.

        The file has what the small files of other checkpoints say. A tokenizer.json beside it replaces its tokenizer.
        """
        from .gguf.reader import GgufReader  # here, because most checkpoints need no such import

        beside = {key: self._pool.submit(self._read_small, key) for key in _FIRST_FILES if key != "config.json"}
        try:
            reader = GgufReader(
                self._gguf_header(name, self._pool.map), partial(self._gguf_header, read_all=map), self._pool
            )
            files = _present({key: future.result() for key, future in beside.items()})
        except BaseException:
            for future in beside.values():
                future.cancel()
            raise
        if "tokenizer.json" not in files:
            files = {}
        return Checkpoint(self._store, reader.index, reader.files(files))

    def _gguf_header(self, name: str, read_all: Callable[..., Iterable[bytes]]) -> tuple[Shard, GgufHeader, Read]:
        """Read a header. ``read_all`` is ``map`` for the parts of a range, perhaps that of a pool."""
        from .gguf.header import read_header

        head, info = self._store.read(name, 0, _GUESS_BYTES)

        def read_part(start: int, stop: int) -> bytes:
            return self._store.read(name, start, stop, info.version)[0]

        def read(start: int, stop: int) -> bytes:
            starts = range(start, stop, _PART_BYTES)
            return b"".join(read_all(read_part, starts, [min(at + _PART_BYTES, stop) for at in starts]))

        header = read_header(name, info.size, head, read)
        return self._shard(name, info, min(header.data_start, info.size)), header, read

    def _shard(self, name: str, info: ObjectInfo, data_start: int = 0) -> Shard:
        path = self._store.local_path(name)
        return Shard(name, info.size, data_start, info.version, str(path) if path else None)

    def _read_small(self, name: str) -> bytes | None:
        """Read a small file; None if there is none.

        Some stores answer 403 for an object that does not exist, and an agent leaves out what its caller may not read.
        """
        if self._unreachable is not None:  # the other file was tried for long enough
            raise self._unreachable
        try:
            return read_whole(self._store.read, name)
        except UnreachableError as error:
            self._unreachable = error
            raise
        except ObjectNotFoundError:
            return None
        except ForbiddenError:
            if type(self._store) is LocalStore:
                raise
            return None


def _folder_of_weights(folder: Path) -> Path | None:
    """Return a folder one or two below with weights of usual names, as a cache of the Hub has (snapshots/COMMIT)."""
    usual = (SAFETENSORS_FILE, SAFETENSORS_INDEX, PYTORCH_FILE, PYTORCH_INDEX, DIFFUSERS_FILE, DIFFUSERS_INDEX)
    found = (path for depth in ("*", "*/*") for name in usual for path in folder.glob(f"{depth}/{name}"))
    return min((path.parent for path in found), default=None)


def _present(files: Mapping[str, bytes | None]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if data is not None}


def _digest(data: bytes) -> str:
    import hashlib  # 4 ms, and only needed if there is a record

    return hashlib.sha256(data).hexdigest()


def read_whole(read: Callable[[str, int, int, str | None], tuple[bytes, ObjectInfo]], name: str) -> bytes:
    data, info = read(name, 0, _GUESS_BYTES, None)
    if info.size > _MOST_SMALL_BYTES:
        raise CorruptError(f"{name}: expected a small file, found {info.size} bytes")
    while len(data) < info.size:
        more, _ = read(name, len(data), info.size, info.version)
        if not more:
            raise CorruptError(f"{name}: truncated: expected {info.size} bytes, found {len(data)}")
        data += more
    # Its parsers may take it as a whole. The text of a tokenizer has more values, and no parser in Python.
    if name.endswith(".json") and not name.endswith("tokenizer.json") and len(data) > _MOST_SMALL_VALUES:
        found = count_values(data, exact_above=_MOST_SMALL_VALUES)
        if found > _MOST_SMALL_VALUES:
            raise CorruptError(f"{name}: expected at most {_MOST_SMALL_VALUES:,} values in JSON, found {found:,}")
    return data


def weight_map(what: str, text: bytes) -> dict[str, str]:
    """Return the shard of each tensor from the text of an index.json, which is called ``what`` in messages.

    Raises CorruptError for a malformed file, and for a name that leads out of the folder.
    """
    try:
        wanted = json.loads(text)["weight_map"]
        items = list(wanted.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptError(
            f"{what}: expected JSON with a weight_map, found {text[:80].decode(errors='replace')!r}"
        ) from None
    suffix = ".bin" if what == PYTORCH_INDEX else ".safetensors"
    for tensor, name in items:
        if not isinstance(name, str) or not name.endswith(suffix):
            raise CorruptError(
                f"{what}: tensor {short_repr(tensor)}: expected a {suffix} file, found {short_repr(name)}"
            )
        _check_inside(what, name)
    if not items:
        raise CorruptError(f"{what}: the weight_map is empty")
    if (count := len({name for _, name in items})) > _MOST_SHARDS:
        raise CorruptError(f"{what}: expected at most {_MOST_SHARDS} shards, found {count}")
    return dict(items)


def module_config_names(text: bytes) -> list[str]:
    """Return the names of the files that a modules.json refers to, or none if it cannot be read."""
    try:
        paths = [module["path"] for module in json.loads(text)]
        return [module_config_name(path) for path in paths[:_MOST_MODULES] if path]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []  # the encoder that needs them says what is wrong


def dense_paths(modules: bytes | None) -> list[str]:
    """Return the folders of the layers in a modules.json that have weights of their own, or none if it cannot be read.

    Raises CorruptError for one that leads out of the checkpoint's folder.
    """
    try:
        listed = json.loads(modules or b"[]")[:_MOST_MODULES]
        paths = [module["path"] for module in listed if str(module["type"]).endswith(".Dense")]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []  # the encoder that needs them says what is wrong
    for path in paths:
        module_config_name(str(path))
    return list(dict.fromkeys(map(str, paths)))


def module_config_name(path: str) -> str:
    """Return the name of a module's config.json. Raises CorruptError if it leads out of the folder."""
    _check_inside(SENTENCE_MODULES, path)
    return f"{path}/config.json"


def _check_inside(what: str, name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or "://" in name:
        raise CorruptError(
            f"{what}: {short_repr(name)} leads out of the checkpoint's folder; expected a name inside it"
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CorruptError(f"{what}: {short_repr(name)} is not a name: it holds half of a character") from None
    if not name.isprintable():
        raise CorruptError(f"{what}: {short_repr(name)} is not a name: it holds a character that cannot be shown")
