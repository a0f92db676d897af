"""The GPUs of this machine, as NVIDIA's management library (NVML) describes them. It makes no CUDA context."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import DeviceError

LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96
# Bytes a second of a lane, by the generation of PCIe, without the encoding of the line.
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_PAYLOAD = 0.88  # of these; an H200 took 55.5 GB/s from pinned memory, of 63
_NO_PERMISSION, _NOT_FOUND, _LOST = 4, 6, 15  # nvmlReturn_t


class GpuInfo(NamedTuple):
    """A GPU, or a part of one in MIG mode. Sizes and rates are 0 where the driver does not say them.

    ``link_bytes_per_s``: from the host's memory, by its PCIe link at full speed. ``lost``: it has fallen off its bus,
    and nothing is known of it.
    """

    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    link_bytes_per_s: float
    lost: bool = False

    @property
    def is_part(self) -> bool:
        """Whether this is a part of a GPU in MIG mode. CUDA_VISIBLE_DEVICES names such a part by its UUID alone."""
        return self.uuid.startswith("MIG-")


class _NvmlError(DeviceError):
    """A call failed, with this ``result`` (nvmlReturn_t)."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} failed with NVML's error {code}; `nvidia-smi` shows the state of the GPU")
        self.result = code


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
        """Return all GPUs that this process may use, in the order of their PCI addresses. Raises DeviceError.

        Of a GPU in MIG mode, these are its parts. GPUs that a container hides are left out: CUDA does not number them.
        """
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))  # counts hidden ones, too
        return [info for number in range(count.value) for info in self._gpu(number)]

    def _gpu(self, number: int) -> Iterator[GpuInfo]:
        device = ctypes.c_void_p()
        try:
            self._call("nvmlDeviceGetHandleByIndex_v2", number, ctypes.byref(device))
            parts = self._parts(device)
            name, link = self._text("nvmlDeviceGetName", device), self._link_bytes_per_s(device)
            yield from [self._described(one, name, link) for one in ([device] if parts is None else parts)]
        except _NvmlError as error:
            if error.result == _LOST:  # its place stays, and the others keep theirs
                yield GpuInfo("", "", 0, 0, 0.0, lost=True)
            elif error.result != _NO_PERMISSION:
                raise

    def _parts(self, device: ctypes.c_void_p) -> list[ctypes.c_void_p] | None:
        """Return the parts of a GPU in MIG mode, and None for any other."""
        enabled, pending, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
        try:
            self._call("nvmlDeviceGetMigMode", device, ctypes.byref(enabled), ctypes.byref(pending))
        except DeviceError:  # a GPU, or a driver, without this mode
            return None
        if not enabled.value:
            return None
        self._call("nvmlDeviceGetMaxMigDeviceCount", device, ctypes.byref(most))
        found = []
        for number in range(most.value):
            part = ctypes.c_void_p()
            try:
                self._call("nvmlDeviceGetMigDeviceHandleByIndex", device, number, ctypes.byref(part))
            except _NvmlError as error:
                if error.result in (_NOT_FOUND, _NO_PERMISSION):
                    continue
                raise
            found.append(part)
        return found

    def _described(self, device: ctypes.c_void_p, name: str, link_bytes_per_s: float) -> GpuInfo:
        """Describe a GPU, or a part of the one of this name and link."""
        memory = _Memory()
        try:
            self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        except _NvmlError as error:
            if error.result == _LOST:
                raise
            memory = _Memory()  # one that shares the host's memory
        try:
            name = self._text("nvmlDeviceGetName", device)  # with the size of a part
        except _NvmlError as error:
            if error.result == _LOST:
                raise
        uuid = self._text("nvmlDeviceGetUUID", device)
        return GpuInfo(uuid, name, memory.total, memory.free, link_bytes_per_s)

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
            raise _NvmlError(function, code)


__all__ = ["GpuInfo", "Nvml"]
