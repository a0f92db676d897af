"""Create the GPU's context while Python imports (ParaServe §5: CUDA context initialization is prioritized).

This takes at least a quarter of a second, most of it without using the CPU. torch works in the device's *primary*
context, so it finds that one ready.
"""

from __future__ import annotations

import ctypes
import threading
from typing import NamedTuple, Self

from ..errors import DeviceError
from ..timeline import Timeline
from .built_for import check_gpu
from .driver import LIBRARY, Driver

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


class DeviceInfo(NamedTuple):
    """A GPU's name and memory, and its context."""

    name: str
    total_bytes: int
    context: int  # the CUcontext


class DeviceContext:
    """The primary context of one GPU. The constructor starts a thread that retains it.

    Never make one in a process that forks afterwards: a context does not survive a fork.
    """

    def __init__(self, ordinal: int = 0, *, library: str = LIBRARY, timeline: Timeline | None = None) -> None:
        self._ordinal = ordinal
        self._library = library
        self._timeline = timeline
        self._driver: Driver | None = None
        self._info: DeviceInfo | None = None
        self._device = ctypes.c_int()
        self._error: DeviceError | None = None
        self._thread = threading.Thread(target=self._run, name="device-context", daemon=True)
        self._thread.start()

    def wait(self) -> DeviceInfo:
        """Wait for the context. Raises DeviceError with the driver's reason."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._info is not None
        return self._info

    def close(self) -> None:
        """Release the context. It is destroyed when its last user has released it. May be called twice."""
        self._thread.join()
        if self._info is not None and self._driver is not None:
            self._driver.call("cuDevicePrimaryCtxRelease_v2", self._device)
            self._info = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            if self._timeline is None:
                self._info = self._retain()
                return
            with self._timeline.stage("context") as detail:
                self._info = self._retain()
                detail["device"] = self._info.name
        except DeviceError as error:
            self._error = error

    def _retain(self) -> DeviceInfo:
        driver = self._driver = Driver(self._library)
        driver.call("cuInit", 0)
        count = ctypes.c_int()
        driver.call("cuDeviceGetCount", ctypes.byref(count))
        if self._ordinal >= count.value:
            raise DeviceError(
                f"expected a GPU number {self._ordinal}, found {count.value} of them; see CUDA_VISIBLE_DEVICES"
            )
        driver.call("cuDeviceGet", ctypes.byref(self._device), self._ordinal)
        name = self._name(driver)
        check_gpu(name, self._capability(driver))
        context = ctypes.c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        return DeviceInfo(name, self._total_bytes(driver), context.value or 0)

    def _name(self, driver: Driver) -> str:
        name = ctypes.create_string_buffer(256)
        driver.call("cuDeviceGetName", name, len(name), self._device)
        return name.value.decode()

    def _capability(self, driver: Driver) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        driver.call("cuDeviceGetAttribute", ctypes.byref(major), _CAPABILITY_MAJOR, self._device)
        driver.call("cuDeviceGetAttribute", ctypes.byref(minor), _CAPABILITY_MINOR, self._device)
        return f"{major.value}.{minor.value}"

    def _total_bytes(self, driver: Driver) -> int:
        total = ctypes.c_size_t()
        driver.call("cuDeviceTotalMem_v2", ctypes.byref(total), self._device)
        return total.value
