"""PyTorch's zip checkpoints (``torch.save``), indexed without torch and without running what is in the pickle.

A ``.pt``, ``.pth`` or ``.bin`` file is a zip archive of uncompressed records: ``data.pkl`` describes the tensors, and
``data/<key>`` is each storage's bytes. Only names of tensors' types are looked up while the pickle is read, so nothing
in it can run: the semantics of ``torch.load(weights_only=True)``, and stricter.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable

from ..errors import CorruptError
from .index import TensorEntry
from .tensor_pickle import Description, read_pickle

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_LOCAL_MAGIC = b"PK\x03\x04"
_MOST_PICKLE_BYTES = 256 << 20
_TAIL_BYTES = 256 << 10
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

Read = Callable[[int, int], bytes]  # bytes [start, stop) of the file


def read_archive(name: str, size_bytes: int, head: bytes, read: Read) -> dict[str, TensorEntry]:
    """The tensors of the archive, by name; their bytes are counted from the start of the file. Shard 0.

    CorruptError says what the file is, when it is no such archive.
    """
    if not head.startswith(b"PK\x03\x04"):
        raise CorruptError(f"{name}: {_what(head)}; {_AGAIN}")
    try:
        archive = zipfile.ZipFile(_File(size_bytes, read))
    except zipfile.BadZipFile as error:
        raise CorruptError(f"{name}: truncated or no zip archive ({error}); fetch or save it again") from None
    records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED:
            raise CorruptError(f"{name}: record {info.filename} is compressed, expected it stored; {_AGAIN}")
    if "data.pkl" not in records:
        raise CorruptError(f"{name}: a zip archive without data.pkl, so not a PyTorch checkpoint; {_AGAIN}")
    if records["data.pkl"].file_size > _MOST_PICKLE_BYTES:
        raise CorruptError(f"{name}: data.pkl is {records['data.pkl'].file_size} bytes long, expected a description")
    if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
        raise CorruptError(f"{name}: saved on a big-endian machine, expected little-endian; save it again on another")
    tensors = read_pickle(name, archive.read(records["data.pkl"]))
    keys = {tensor.storage.key for tensor in tensors.values()}
    for key in keys:
        if f"data/{key}" not in records:
            raise CorruptError(f"{name}: data.pkl names the record data/{key}, which is missing; save it again")
    starts = _starts(name, {key: records[f"data/{key}"] for key in keys}, read, _alignment(archive, records))
    found = {}
    for tensor, description in tensors.items():
        info = records[f"data/{description.storage.key}"]
        found[tensor] = _entry(f"{name}: tensor {tensor!r}", description, starts[description.storage.key], info)
    return found


def directory_start(size_bytes: int, read: Read) -> int:
    """Where the archive's directory begins, which ends the file: it holds a checksum of each record."""
    with zipfile.ZipFile(_File(size_bytes, read)) as archive:
        return archive.start_dir


_AGAIN = 'expected torch.save(model.state_dict(), "model.pt") of PyTorch 1.6 or later, or safetensors'


def _what(head: bytes) -> str:
    if head.startswith(b"\x80"):
        return "a pickle of PyTorch before 1.6, which cannot be streamed"
    if head[257:262] == b"ustar":
        return "a tar file of a very old PyTorch"
    return f"not a PyTorch checkpoint (it starts with {head[:8]!r})"


def _entry(what: str, description: Description, start: int, info: zipfile.ZipInfo) -> TensorEntry:
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


def _alignment(archive: zipfile.ZipFile, records: dict[str, zipfile.ZipInfo]) -> int:
    text = archive.read(records[".storage_alignment"]) if ".storage_alignment" in records else b"64"
    return int(text) if text.isdigit() and int(text) else 64


def _starts(name: str, infos: dict[str, zipfile.ZipInfo], read: Read, alignment: int) -> dict[str, int]:
    """Where each record's bytes start: behind its local header, which is padded so that they are aligned.

    As PyTorch's own ``get_record_offset_no_read``; the first and the last one are compared with the file, and where
    somebody else has packed the archive every header is read.
    """
    guesses = {key: _padded(info, alignment) for key, info in infos.items()}
    ordered = sorted(infos, key=lambda key: infos[key].header_offset)
    for key in {*ordered[:1], *ordered[-1:]}:
        if _told(name, infos[key], read) != guesses[key]:
            return {key: _told(name, info, read) for key, info in infos.items()}
    return guesses


def _padded(info: zipfile.ZipInfo, alignment: int) -> int:
    start = info.header_offset + _LOCAL_HEADER.size + len(info.filename.encode()) + 4
    if info.file_size >= 0xFFFFFFFF or info.header_offset >= 0xFFFFFFFF:
        start += 4 + (16 if info.file_size >= 0xFFFFFFFF else 0) + (8 if info.header_offset >= 0xFFFFFFFF else 0)
    return -(-start // alignment) * alignment


def _told(name: str, info: zipfile.ZipInfo, read: Read) -> int:
    header = read(info.header_offset, info.header_offset + _LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or header[:4] != _LOCAL_MAGIC:
        raise CorruptError(f"{name}: no record at byte {info.header_offset}, expected {info.filename}; fetch it again")
    *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    return info.header_offset + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)


class _File(io.RawIOBase):
    """What zipfile needs of a file: its directory at the end, and a few records. Reads the end once."""

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
