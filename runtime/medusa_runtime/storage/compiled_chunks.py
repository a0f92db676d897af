"""Receive and send chunks, between a socket and a region, in compiled code (``kernels/source/chunks.c``).

Without the compiled library, or with TLS, Python does the same (``peer.py``, and the node server).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from typing import Any, ClassVar

from ..compiled_library import LIBRARY

_INTERFACE = 1  # the version of chunks.c's interface
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
DONE, TIMED_OUT, CLOSED, CORRUPT, STOPPED = range(5)  # the statuses of ``receive`` and ``send``; or a negative errno


class ChunkPointers(ctypes.Structure):
    """Neighbouring chunks of one shard, with the addresses of the first one's marks in a region (``struct chunks``)."""

    _fields_: ClassVar = [
        *((name, _LONG) for name in ("count", "bytes", "last_bytes")),
        *((name, _POINTER) for name in ("table", "checksums", "fetched", "first_ns")),
    ]


class _Frame(ctypes.Structure):
    _fields_: ClassVar = [("size", ctypes.c_uint32), ("padding", ctypes.c_uint32), ("checksum", ctypes.c_uint64)]


class ReceiveJob(ctypes.Structure):
    """What ``receive`` is to do, and how far it is (``struct receive_job``). It must be kept while ``receive`` runs."""

    _fields_: ClassVar = [
        ("chunks", ChunkPointers),
        ("data", _POINTER),
        ("checksum", _POINTER),
        *((name, _LONG) for name in ("stop", "done", "filled")),
        *((name, _INT) for name in ("connection", "silence_ms", "wake_bytes", "populate")),
        ("frame", _Frame),
    ]

    @property
    def filled_bytes(self) -> int:
        """The number of bytes in complete chunks."""
        return _bytes_of(self.chunks, self.done)

    @property
    def wire_bytes(self) -> int:
        """The number of bytes that have come, frames included."""
        return int(self.filled_bytes + self.done * ctypes.sizeof(_Frame) + self.filled)


class SendJob(ctypes.Structure):
    """What ``send`` is to do, and how far it is (``struct send_job``). Another thread may set ``stopped`` to end it."""

    _fields_: ClassVar = [
        ("chunks", ChunkPointers),
        *((name, _LONG) for name in ("offset", "done", "filled")),
        *((name, _INT) for name in ("connection", "file", "idle_ms", "patience_ms", "stopped")),
        ("frame", _Frame),
    ]

    @property
    def sent_bytes(self) -> int:
        """The number of bytes in the chunks that were sent."""
        return _bytes_of(self.chunks, self.done)


class ReceiveTarget:
    """Neighbouring chunks of one shard that are about to be received straight into a region.

    ``data`` is the address of the first chunk, and ``populate`` says whether the pages still have to be allocated.
    """

    def __init__(self, chunks: ChunkPointers, data: int, *, populate: bool) -> None:
        self._chunks = chunks
        self._data = data
        self._populate = populate

    def receive_job(self, done: int) -> ReceiveJob:
        """Return the argument of ``receive`` for a range of which ``done`` chunks have already come."""
        found = compiled_functions()
        assert found is not None
        return ReceiveJob(
            chunks=self._chunks, data=self._data, checksum=found.checksum, done=done, populate=int(self._populate)
        )


class CompiledChunks:
    """The compiled functions. They run without the interpreter's lock."""

    def __init__(self) -> None:
        """Raises OSError or AttributeError without the library, ImportError without xxhash."""
        library = ctypes.CDLL(str(LIBRARY))
        if library.medusa_chunks_interface() != _INTERFACE:
            raise AttributeError("the library was built from other sources")
        # Python's package of xxhash has the C function, too.
        module = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
        self._keep = module
        self.checksum = ctypes.cast(module.XXH3_64bits, _POINTER).value
        self._receive: Any = library.medusa_receive_chunks
        self._send: Any = library.medusa_send_chunks
        self._publish: Any = library.medusa_publish_chunk
        self._receive.argtypes = [ctypes.POINTER(ReceiveJob)]
        self._send.argtypes = [ctypes.POINTER(SendJob)]
        self._publish.argtypes, self._publish.restype = [ctypes.POINTER(ChunkPointers), _LONG, ctypes.c_uint64], None

    def receive(self, job: ReceiveJob) -> int:
        """Receive, verify and publish chunks until ``job.stop``, and return a status."""
        return int(self._receive(job))

    def send(self, sending: SendJob) -> int:
        """Send chunks, each as soon as the region has it, and return a status."""
        return int(self._send(sending))

    def publish(self, chunks: ChunkPointers, number: int, checksum: int) -> None:
        """Publish one chunk to readers. A chunk that is already published stays as it is."""
        self._publish(chunks, number, checksum)


@functools.cache
def compiled_functions() -> CompiledChunks | None:
    """Return the compiled functions, or None where they cannot be used."""
    try:
        return CompiledChunks()
    except (OSError, AttributeError, ImportError):
        return None


def _bytes_of(chunks: ChunkPointers, done: int) -> int:
    return int((done - 1) * chunks.bytes + chunks.last_bytes if done and done == chunks.count else done * chunks.bytes)


__all__ = [
    "CLOSED",
    "CORRUPT",
    "DONE",
    "STOPPED",
    "TIMED_OUT",
    "ChunkPointers",
    "CompiledChunks",
    "ReceiveJob",
    "ReceiveTarget",
    "SendJob",
    "compiled_functions",
]
