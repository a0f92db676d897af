"""Copying weights into a GPU's memory, through pinned memory that several threads fill.

The region's own pages could be registered with the driver and read in place. But the driver registers one range at a
time, with 4-KiB and 2-MiB pages alike, so that even many threads reach less than 60 % of what a PCIe 5 link carries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from medusa_runtime.container_limits import cpu_count
from medusa_runtime.device.driver import Driver
from medusa_runtime.errors import DeviceError
from medusa_runtime.load.upload.staging import StagingThreads, StagingUnavailableError, Transfer
from medusa_runtime.region.file_range import FileRange

logger = logging.getLogger(__name__)

_MOST_THREADS = 12  # eight fill pinned memory faster than PCIe 5 carries it, but not where page faults take long


class CudaCopy:
    """The copy of one tensor. Its dtype is converted on the device, which is faster and keeps no processor busy."""

    def __init__(self, target: Tensor, raw: Tensor, transfer: Transfer | None, stream: torch.cuda.Stream) -> None:
        """``raw`` gets the tensor's bytes by the ``transfer``: the target itself if nothing is to be converted."""
        self._target = target
        self._raw = raw
        self._transfer = transfer
        self._stream = stream
        self._converted: torch.cuda.Event | None = None

    def done(self) -> bool:
        if self._converted is None:
            if self._transfer is not None and not self._transfer.done():
                return False
            if self._raw is self._target:
                return True
            with torch.cuda.stream(self._stream):
                self._target.copy_(self._raw)
                self._converted = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._converted.record(self._stream)
        return bool(self._converted.query())  # type: ignore[no-untyped-call]


class CudaLink:
    """Copies tensors in the background, urgent ones first. Belongs to one thread, except for ``close``."""

    def __init__(
        self,
        device: torch.device,
        memory: Callable[[str, int], Tensor] | None = None,
        *,
        most_threads: int | None = None,
    ) -> None:
        """``memory`` allocates device memory by a name; without it torch does. At most ``most_threads`` threads copy.

        Pinned memory is allocated in the background from now on. The device's context is the calling thread's.
        """
        self.device = device
        self._memory = memory
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._is_full = False
        self._staging: StagingThreads | None = None
        try:
            self._staging = StagingThreads(Driver(), min(most_threads or _MOST_THREADS, cpu_count()))
        except StagingUnavailableError as error:
            logger.warning("weights go to the GPU at a fifth of the link's speed: %s", error)

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

    def copy(self, target: Tensor, source: Tensor, *, urgent: bool, stored: FileRange | None = None) -> CudaCopy:
        # Each operation of torch gives up the interpreter's lock, so none is done needlessly.
        if not source.is_contiguous():
            source, stored = source.contiguous(), None
        raw = target
        if target.dtype is not source.dtype:
            room = self.room_for(source)
            if room is None:
                self._warn_of_conversion(source)
                source, stored = source.to(target.dtype), None
            else:
                raw = room
        if self._staging is None:
            with torch.cuda.stream(self._stream):
                raw.copy_(source)
            return CudaCopy(target, raw, None, self._stream)
        transfer = self._staging.begin(
            raw.data_ptr(), source.data_ptr(), source.nbytes, urgent=urgent, stored=stored, keep=(source, raw)
        )
        return CudaCopy(target, raw, transfer, self._stream)

    def room_for(self, source: Tensor) -> Tensor | None:
        """Allocate memory on the device for a copy of a tensor, uninitialized; None if the device is full."""
        try:
            with torch.cuda.stream(self._stream):  # memory that another stream has freed may still be in use there
                return torch.empty(source.shape, dtype=source.dtype, device=self.device)
        except torch.OutOfMemoryError:
            return None

    def hand_over(self, room: Tensor) -> None:
        """Let the current stream use memory from ``room_for``. Once freed, it is not used again before that is done."""
        room.record_stream(torch.cuda.current_stream(self.device))

    def _warn_of_conversion(self, source: Tensor) -> None:
        if not self._is_full:
            logger.warning(
                "the GPU has no %d MiB free to convert a weight's dtype, so the processor does it, which takes "
                "longer; use a larger GPU, a lower --kv-cache-mb, or a checkpoint with the dtype that is used",
                -(-source.nbytes >> 20),
            )
        self._is_full = True

    def close(self) -> None:
        if self._staging is not None:
            self._staging.close()
        self._stream.synchronize()
