"""The GPUs of this machine, as NVIDIA's management library (NVML) describes them. It makes no CUDA context."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from ..errors import DeviceError

LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96
# Bytes a second of a lane, by the generation of PCIe, without the encoding of the line.
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_PAYLOAD = 0.88  # of these; an H200 took 55.5 GB/s from pinned memory, of 63


class GpuInfo(NamedTuple):
    """A GPU. Sizes and rates are 0 where the driver does not say them.

    ``link_bytes_per_s``: from the host's memory, by its PCIe link at full speed.
    """

    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    link_bytes_per_s: float


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Nvml:
    """The loaded library. Its calls may block for as long as a GPU hangs.

    Close it before a fork: it does not work in a process that was forked from one in which it is open.
    """

    def __init__(self, file: str = LIBRARY) -> None:
        """Load and initialize the library. Raises DeviceError if there is none, or no driver."""
        try:
            self._functions = ctypes.CDLL(file)
        except OSError as error:
            raise DeviceError(f"{file} cannot be loaded: {error}") from None
        self._call("nvmlInit_v2")

    def close(self) -> None:
        """Release what the library holds. Nothing may be called after it."""
        self._call("nvmlShutdown")

    def gpus(self) -> list[GpuInfo]:
        """Return all GPUs, in the order of their PCI addresses. Raises DeviceError."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [self._gpu(number) for number in range(count.value)]

    def _gpu(self, number: int) -> GpuInfo:
        device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", number, ctypes.byref(device))
        memory = _Memory()
        try:
            self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        except DeviceError:  # one that shares the host's memory
            memory = _Memory()
        return GpuInfo(
            self._text("nvmlDeviceGetUUID", device),
            self._text("nvmlDeviceGetName", device),
            memory.total,
            memory.free,
            self._link_bytes_per_s(device),
        )

    def _link_bytes_per_s(self, device: ctypes.c_void_p) -> float:
        """Return the rate of the PCIe link at its best: an idle GPU slows it down to save power."""
        generation, lanes = ctypes.c_uint(), ctypes.c_uint()
        try:
            self._call("nvmlDeviceGetMaxPcieLinkGeneration", device, ctypes.byref(generation))
            self._call("nvmlDeviceGetMaxPcieLinkWidth", device, ctypes.byref(lanes))
        except DeviceError:
            return 0.0
        return _LANE_BYTES_PER_S.get(generation.value, 0.0) * lanes.value * _PAYLOAD

    def _text(self, function: str, device: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self._call(function, device, text, len(text))
        return text.value.decode(errors="replace")

    def _call(self, function: str, *arguments: Any) -> None:
        try:
            called = getattr(self._functions, function)
        except AttributeError:
            raise DeviceError(f"the driver's NVML has no {function}") from None
        if code := called(*arguments):
            raise DeviceError(f"{function} failed with NVML's error {code}; `nvidia-smi` shows the state of the GPU")


__all__ = ["GpuInfo", "Nvml"]
