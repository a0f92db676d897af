"""Copying weights into a GPU's memory: from the region's own pages, or through pinned staging memory.

A copy engine reads only host memory that cannot move. Either the pages of a tensor are registered with the driver and
read in place, so that nothing is copied twice, or its bytes pass through a ring of pinned buffers. A page is registered
only for a tensor that fills all of it, and until ``forget``: memory that is freed while it is registered may be mapped
anew, and the copy engine would still read the old pages.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Callable
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa_runtime.checkpoint.index import PAGE_BYTES
from medusa_runtime.device.driver import Driver
from medusa_runtime.errors import DeviceError
from medusa_runtime.load.upload.trial import Trial

logger = logging.getLogger(__name__)

COPY_METHODS = ("auto", "register", "staging")
_PIECE_BYTES = 16 << 20
_PIECES = 12
_LEAST_REGISTERED_BYTES = 1 << 20  # below it, registering takes longer than a copy
_READ_ONLY = 0x08  # CU_MEMHOSTREGISTER_READ_ONLY; the region is mapped so
_URGENT, _BACKGROUND = -1, 0  # CUDA's stream priorities: lower goes first


class _Piece(NamedTuple):
    buffer: Tensor  # pinned, uint8
    event: torch.cuda.Event


class CudaCopy:
    """A copy that is done when its event has passed. Keeps alive the memory that the copy engine reads."""

    def __init__(self, event: torch.cuda.Event, keep: Any) -> None:
        self._event = event
        self._keep = keep

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class CudaLink:
    """Copies tensors on several streams, urgent ones on streams of high priority.

    Belongs to one thread, except for ``close``.
    """

    def __init__(
        self,
        device: torch.device,
        memory: Callable[[str, int], Tensor] | None = None,
        *,
        method: str = "auto",
        pieces: int = _PIECES,
    ) -> None:
        """``memory`` allocates device memory by a name; without it torch does.

        ``method`` is ``register``, ``staging``, or ``auto``, which tries both and keeps the faster one.
        """
        assert method in COPY_METHODS
        self.device = device
        self._memory = memory
        self.registered_bytes = 0
        self._trial = Trial(COPY_METHODS[1:])
        self._trial.chosen = None if method == "auto" else method
        self._must_register = method == "register"
        urgent = [torch.cuda.Stream(device, priority=_URGENT) for _ in range(2)]  # type: ignore[no-untyped-call]
        background = [torch.cuda.Stream(device, priority=_BACKGROUND) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._streams = {True: cycle(urgent), False: cycle(background)}
        self._all_streams = (*urgent, *background)
        self._ring: deque[_Piece] = deque()
        self._pieces = pieces
        self._driver = Driver()
        self._registered: dict[int, int] = {}  # address → bytes

    def allocate(self, name: str, size_bytes: int) -> Tensor:
        if self._memory is not None:
            return self._memory(name, size_bytes)
        try:
            return torch.empty(max(size_bytes, 1), dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            raise DeviceError(
                f"expected {size_bytes >> 20} MiB of the GPU's memory for the {name}, found {free >> 20} MiB free of "
                f"{total >> 20}; use a larger GPU, or end what else runs on this one"
            ) from error

    def copy(self, target: Tensor, source: Tensor, *, urgent: bool) -> CudaCopy:
        original, source = source, source.contiguous()
        in_place = source.data_ptr() == original.data_ptr()  # else a copy, whose memory ``forget`` does not know
        stream: torch.cuda.Stream = next(self._streams[urgent])
        with torch.cuda.stream(stream):
            if target.dtype is source.dtype and target.is_contiguous():
                raw = target
            else:  # convert on the device, which is faster and keeps no thread busy
                raw = torch.empty(source.shape, dtype=source.dtype, device=self.device)
            self._copy_bytes(_bytes(raw), _bytes(source), stream, in_place=in_place)
            if raw is not target:
                target.copy_(raw)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return CudaCopy(event, (source, raw))

    def _copy_bytes(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream, *, in_place: bool) -> None:
        begin, end = self._own_pages(source)
        if not in_place or end - begin < _LEAST_REGISTERED_BYTES:
            self._stage(target, source, stream)
            return
        method = self._trial.next()
        with self._trial.timed(method, source.numel()):
            if method == "staging" or not self._registers(source[begin:end]):
                self._stage(target, source, stream)
            else:
                self._read_in_place(target, source, begin, end, stream)

    def _read_in_place(self, target: Tensor, source: Tensor, begin: int, end: int, stream: torch.cuda.Stream) -> None:
        target[begin:end].copy_(source[begin:end], non_blocking=True)
        self._stage(target[:begin], source[:begin], stream)
        self._stage(target[end:], source[end:], stream)
        self.registered_bytes += end - begin

    @staticmethod
    def _own_pages(source: Tensor) -> tuple[int, int]:
        """Return the part [begin, end) of these bytes whose pages hold nothing else."""
        address, size = source.data_ptr(), source.numel()
        begin = -address % PAGE_BYTES
        end = size - (address + size) % PAGE_BYTES
        return (begin, end) if begin < end else (0, 0)

    def _registers(self, source: Tensor) -> bool:
        address, size = source.data_ptr(), source.numel()
        if self._registered.get(address) == size:
            return True
        try:
            # Not cudaHostRegister: if it refuses, the next kernel that is launched raises that error, too.
            self._driver.call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size), _READ_ONLY)
        except DeviceError as error:
            if self._must_register:
                raise
            logger.info("the region's pages cannot be registered, its bytes are staged: %s", error)
            self._trial.give_up("register")
            return False
        self._registered[address] = size
        return True

    def _stage(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        for start in range(0, source.numel(), _PIECE_BYTES):
            part = source[start : start + _PIECE_BYTES]
            piece = self._free_piece()
            buffer = piece.buffer[: part.numel()]
            buffer.copy_(part)  # torch uses several threads: one cannot fill pinned memory as fast as the GPU reads it
            target[start : start + part.numel()].copy_(buffer, non_blocking=True)
            piece.event.record(stream)
            self._ring.append(piece)

    def _free_piece(self) -> _Piece:
        if len(self._ring) < self._pieces:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            return _Piece(torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True), event)
        piece = self._ring.popleft()
        piece.event.synchronize()
        return piece

    def forget(self, source: Tensor) -> None:
        if source.is_contiguous():  # else nothing was registered
            raw = _bytes(source)
            with self._trial.timed("register", 0):  # it may wait for copies that run
                self._unregister(raw.data_ptr() + self._own_pages(raw)[0])

    def close(self) -> None:
        for stream in self._all_streams:
            stream.synchronize()
        self._ring.clear()
        for address in tuple(self._registered):
            self._unregister(address)

    def _unregister(self, address: int) -> None:
        if self._registered.pop(address, None) is not None:
            self._driver.call("cuMemHostUnregister", ctypes.c_void_p(address))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)
