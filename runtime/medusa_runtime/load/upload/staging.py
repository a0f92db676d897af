"""Threads that copy the host's memory to a device through pinned (page-locked) memory, urgent copies first.

A copy engine reads only memory that cannot move, and one thread cannot fill such memory as fast as the engine reads it.
The threads run in compiled code (``kernels/source/staging.c``), without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, ClassVar

from medusa_runtime.compiled_library import LIBRARY
from medusa_runtime.device.driver import Driver
from medusa_runtime.region.file_range import FileRange

_INTERFACE = 2  # the version of staging.c's interface
_TO_MAKE_IT = "`python -m medusa_runtime.kernels.build` makes it"
_FUNCTIONS = {  # the fields of ``struct driver``
    "set_context": "cuCtxSetCurrent",
    "create_stream": "cuStreamCreate",
    "destroy_stream": "cuStreamDestroy_v2",
    "create_event": "cuEventCreate",
    "destroy_event": "cuEventDestroy_v2",
    "allocate": "cuMemHostAlloc",
    "release": "cuMemFreeHost",
    "copy": "cuMemcpyHtoDAsync_v2",
    "record": "cuEventRecord",
    "wait": "cuEventSynchronize",
}
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int


class _Functions(ctypes.Structure):
    """``struct driver``"""

    _fields_: ClassVar = [(name, _POINTER) for name in _FUNCTIONS]


class _Transfer(ctypes.Structure):
    """``struct transfer``"""

    _fields_: ClassVar = [
        ("target", ctypes.c_uint64),
        ("source", _POINTER),
        *((name, _LONG) for name in ("size", "offset")),
        ("file", _INT),
        ("left", _LONG),
        ("failure", _INT),
        ("taken", _LONG),
        ("next", _POINTER),
    ]


class StagingUnavailableError(Exception):
    """The compiled code cannot be loaded, or no thread be started; the message says why."""


class Transfer:
    """Bytes on their way to a device."""

    def __init__(
        self,
        threads: StagingThreads,
        target: int,
        source: int,
        size_bytes: int,
        stored: FileRange | None,
        keep: object,
    ) -> None:
        file, offset = (-1, 0) if stored is None else (stored.file.fileno(), stored.offset)
        self.native = _Transfer(
            target=target, source=source, size=size_bytes, offset=offset, file=file, left=size_bytes
        )
        self._threads = threads
        self._keep = stored, keep

    def done(self) -> bool:
        """Return whether all bytes are on the device. Raises DeviceError if they cannot be copied."""
        if self.native.failure:
            self._threads.driver.check("copying weights to the device", self.native.failure)
        if not self.native.left:
            return True
        self._threads.raise_failure()
        return False


class StagingThreads:
    """Threads that share a queue of transfers. Each has a stream and pinned memory, from its start until ``close``."""

    def __init__(self, driver: Driver, count: int) -> None:
        """Start the threads. The device's context has to be the calling thread's current one.

        Raises StagingUnavailableError if this installation has no compiled code, or no thread can be started.
        """
        try:
            self._library = ctypes.CDLL(str(LIBRARY))
            found = self._library.medusa_staging_interface()
            # It takes microseconds, and getting the interpreter's lock again can take milliseconds.
            self._begin: Any = ctypes.PyDLL(str(LIBRARY)).medusa_staging_begin
        except (OSError, AttributeError) as error:
            raise StagingUnavailableError(f"{error}; {_TO_MAKE_IT}") from error
        if found != _INTERFACE:
            raise StagingUnavailableError(
                f"{LIBRARY.name} was built from other sources: expected interface {_INTERFACE}, found {found}; "
                f"{_TO_MAKE_IT}"
            )
        self._begin.argtypes, self._begin.restype = [_POINTER, ctypes.POINTER(_Transfer), _INT], None
        self._library.medusa_staging_new.restype = _POINTER
        self.driver = driver
        context = ctypes.c_void_p()
        driver.call("cuCtxGetCurrent", ctypes.byref(context))
        functions = _Functions(**{field: driver.address(function) for field, function in _FUNCTIONS.items()})
        self._staging = _POINTER(self._library.medusa_staging_new(ctypes.byref(functions), context))
        if not self._staging:
            raise MemoryError("no memory for the queue of copies")
        self._transfers: list[Transfer] = []  # what the threads may use; they hold no references
        self._failures: list[int] = []  # of threads that cannot copy
        self._closing = threading.Lock()
        self._threads: list[threading.Thread] = []
        for number in range(count):
            thread = threading.Thread(target=self._run, name=f"medusa-staging-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the limit of threads; fewer of them copy, too
                if not self._threads:
                    self.close()
                    raise StagingUnavailableError(str(error)) from error
                break
            self._threads.append(thread)

    def begin(
        self,
        target: int,
        source: int,
        size_bytes: int,
        *,
        urgent: bool,
        keep: object,
        stored: FileRange | None = None,
    ) -> Transfer:
        """Begin to copy ``size_bytes`` bytes from the host's address ``source`` to the device's ``target``.

        The bytes must not change until the transfer is done. ``keep`` is what owns them. If they are ``stored`` in a
        file, they are read from there, as far as it can be read.
        """
        transfer = Transfer(self, target, source, size_bytes, stored, keep)
        if size_bytes:
            self._transfers = [each for each in self._transfers if each.native.left]
            self._transfers.append(transfer)
            self._begin(self._staging, transfer.native, urgent)
        return transfer

    def raise_failure(self) -> None:
        """Raise DeviceError if none of the threads can copy."""
        if len(self._failures) == len(self._threads):
            self.driver.check("allocating pinned memory", self._failures[0])

    def close(self) -> None:
        """Wait for the parts that are being copied, drop all others, and end the threads.

        May be called twice, and by any thread.
        """
        with self._closing:
            if not self._staging:
                return
            self._library.medusa_staging_stop(self._staging)
            for thread in self._threads:
                thread.join()
            self._library.medusa_staging_free(self._staging)
            self._staging = _POINTER()
            self._transfers = []

    def _run(self) -> None:
        if failure := self._library.medusa_staging_run(self._staging):
            self._failures.append(failure)


__all__ = ["StagingThreads", "StagingUnavailableError", "Transfer"]
