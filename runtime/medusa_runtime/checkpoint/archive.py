"""An index of PyTorch's zip checkpoints (``torch.save``), made without torch and without running the pickle.

A ``.pt``, ``.pth`` or ``.bin`` file is a zip archive of uncompressed records: ``data.pkl`` describes the tensors, and
``data/<key>`` holds the bytes of a storage. Only the names of tensors' types are looked up while the pickle is read, so
nothing in it can run. This is what ``torch.load(weights_only=True)`` does, but stricter. The file is not trusted: its
directory and its pickle have a largest size, and every tensor's bytes must lie within the file.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable

from ..errors import CorruptError, short_repr
from .index import TensorEntry
from .tensor_pickle import PickledTensor, read_pickle

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_LOCAL_MAGIC = b"PK\x03\x04"
_MOST_PICKLE_BYTES = 16 << 20
_MOST_READ_BYTES = 16 << 20  # at a time; enough for a directory of more than 100,000 records
_MOST_NOTE_BYTES = 64  # the largest size of the records byteorder and .storage_alignment
_TAIL_BYTES = 256 << 10

Read = Callable[[int, int], bytes]  # bytes [start, stop) of the file


def read_archive(name: str, size_bytes: int, head: bytes, read: Read) -> dict[str, TensorEntry]:
    """Return the archive's tensors by name. Their shard is 0, and their bytes are counted from the start of the file.

    ``name`` is the file's name for messages, and ``head`` its first bytes. Raises CorruptError, which says what the
    file is if it is not such an archive. Errors of ``read`` pass through.
    """
    if not head.startswith(_LOCAL_MAGIC):
        raise CorruptError(f"{name}: {_what(head)}; {_AGAIN}")
    try:
        archive = zipfile.ZipFile(_File(size_bytes, read))
    except _NOT_A_ZIP as error:
        raise _truncated(name, error) from None
    records = _records(name, archive)
    if "byteorder" in records and _note(name, archive, records["byteorder"]) != b"little":
        raise CorruptError(f"{name}: saved on a big-endian machine, expected little-endian; save it again on another")
    tensors = read_pickle(name, _content(name, archive, records["data.pkl"], _MOST_PICKLE_BYTES))
    keys = {tensor.storage.key for tensor in tensors.values()}
    for key in keys:
        if f"data/{key}" not in records:
            raise CorruptError(f"{name}: data.pkl names the record data/{key[:60]}, which is missing; {_SAVE}")
    alignment = _alignment(name, archive, records)
    starts = _starts(name, {key: records[f"data/{key}"] for key in keys}, read, alignment)
    found = {}
    for tensor, description in tensors.items():
        what, info = f"{name}: tensor {short_repr(tensor)}", records[f"data/{description.storage.key}"]
        entry = _entry(what, description, starts[description.storage.key], info)
        if entry.stop > size_bytes:
            raise CorruptError(f"{what}: it ends at byte {entry.stop}, but the file has {size_bytes}; fetch it again")
        found[tensor] = entry
    return found


# What zipfile raises for a broken archive. Its own checks do not cover every broken file.
_NOT_A_ZIP = (zipfile.BadZipFile, struct.error, ValueError, EOFError, OverflowError, RuntimeError)
_SAVE = "save it again"


def _truncated(name: str, error: Exception) -> CorruptError:
    what = f" ({error})" if isinstance(error, zipfile.BadZipFile) else ""
    return CorruptError(f"{name}: truncated or no zip archive{what[:200]}; fetch or save it again")


def _records(name: str, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the records by their names inside the archive's folder."""
    records: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED:
            raise CorruptError(
                f"{name}: record {short_repr(info.filename)} is compressed, expected it stored; {_AGAIN}"
            )
        _, _, key = info.filename.partition("/")
        if key and key in records:
            raise CorruptError(f"{name}: holds the record {short_repr(key)} twice, expected once; {_SAVE}")
        records[key] = info
    if "data.pkl" not in records:
        raise CorruptError(f"{name}: a zip archive without data.pkl, so not a PyTorch checkpoint; {_AGAIN}")
    return records


def _content(name: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo, most_bytes: int) -> bytes:
    if max(info.file_size, info.compress_size) > most_bytes:
        raise CorruptError(
            f"{name}: record {short_repr(info.filename)} is {info.file_size} bytes long, expected at most {most_bytes}"
        )
    try:
        return archive.read(info)
    except _NOT_A_ZIP as error:
        raise _truncated(name, error) from None


def _note(name: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    return _content(name, archive, info, _MOST_NOTE_BYTES)


def directory_start(size_bytes: int, read: Read) -> int:
    """Return the byte at which the directory begins. It reaches to the file's end and has a checksum of each record."""
    with zipfile.ZipFile(_File(size_bytes, read)) as archive:
        return archive.start_dir


_AGAIN = 'expected torch.save(model.state_dict(), "model.pt") of PyTorch 1.6 or later, or safetensors'


def _what(head: bytes) -> str:
    if head.startswith(b"\x80"):
        return "a pickle of PyTorch before 1.6, which cannot be streamed"
    if head[257:262] == b"ustar":
        return "a tar file of a very old PyTorch"
    return f"not a PyTorch checkpoint (it starts with {head[:8]!r})"


def _entry(what: str, description: PickledTensor, start: int, info: zipfile.ZipInfo) -> TensorEntry:
    storage, item = description.storage, description.item_bytes
    if storage.elements * storage.item_bytes > info.file_size:
        raise CorruptError(
            f"{what}: its storage has {storage.elements * storage.item_bytes} bytes, but the record {info.file_size}"
        )
    length = description.extent * item
    offset = description.offset * item
    if description.offset < 0 or min(description.strides, default=0) < 0 or offset + length > info.file_size:
        raise CorruptError(f"{what}: its bytes {offset} to {offset + length} are not in its record ({info.file_size})")
    strides = None if description.is_contiguous else description.strides
    return TensorEntry(0, start + offset, start + offset + length, description.dtype, description.shape, strides)


def _alignment(name: str, archive: zipfile.ZipFile, records: dict[str, zipfile.ZipInfo]) -> int:
    text = _note(name, archive, records[".storage_alignment"]) if ".storage_alignment" in records else b"64"
    return int(text) if text.isdigit() and int(text) else 64


def _starts(name: str, infos: dict[str, zipfile.ZipInfo], read: Read, alignment: int) -> dict[str, int]:
    """Return the byte at which each record's content starts: behind its local header, which is padded for alignment.

    The starts are computed like those of PyTorch's ``get_record_offset_no_read``, and the first and the last one are
    compared with the file. If they differ, because another tool has packed the archive, every local header is read.
    """
    guesses = {key: _padded(info, alignment) for key, info in infos.items()}
    ordered = sorted(infos, key=lambda key: infos[key].header_offset)
    for key in {*ordered[:1], *ordered[-1:]}:
        if _recorded_start(name, infos[key], read) != guesses[key]:
            return {key: _recorded_start(name, info, read) for key, info in infos.items()}
    return guesses


def _padded(info: zipfile.ZipInfo, alignment: int) -> int:
    start = info.header_offset + _LOCAL_HEADER.size + len(info.filename.encode()) + 4
    if info.file_size >= 0xFFFFFFFF or info.header_offset >= 0xFFFFFFFF:
        start += 4 + (16 if info.file_size >= 0xFFFFFFFF else 0) + (8 if info.header_offset >= 0xFFFFFFFF else 0)
    return -(-start // alignment) * alignment


def _recorded_start(name: str, info: zipfile.ZipInfo, read: Read) -> int:
    header = read(info.header_offset, info.header_offset + _LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or header[:4] != _LOCAL_MAGIC:
        raise CorruptError(
            f"{name}: no record at byte {info.header_offset}, expected {short_repr(info.filename)}; fetch it again"
        )
    *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    return info.header_offset + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)


class _File(io.RawIOBase):
    """A file object for zipfile, which reads the directory at the end and a few records. The end is fetched once."""

    def __init__(self, size_bytes: int, read: Read) -> None:
        self._size = size_bytes
        self._read = read
        self._at = 0
        self._tail_start = max(size_bytes - _TAIL_BYTES, 0)
        self._tail: bytes | None = None

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(offset + (0, self._at, self._size)[whence], 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        stop = self._size if count is None or count < 0 else min(self._at + count, self._size)
        if stop - self._at > _MOST_READ_BYTES:
            raise zipfile.BadZipFile(f"its directory is {stop - self._at} bytes long")
        if self._at >= stop:
            return b""
        if self._at >= self._tail_start:
            if self._tail is None:
                self._tail = self._read(self._tail_start, self._size)
            data = self._tail[self._at - self._tail_start : stop - self._tail_start]
        else:
            data = self._read(self._at, stop)
        self._at += len(data)
        return data
