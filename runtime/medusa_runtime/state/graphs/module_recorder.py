"""Offline: every kernel image that the driver loads, told by CUPTI; also those that libraries hide."""

from __future__ import annotations

import ctypes
import logging
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_void_p
from typing import Any

from ...errors import DeviceError, StateError
from .images import ImageStore

logger = logging.getLogger(__name__)

LIBRARY = "libcupti.so.13"
_RESOURCE, _MODULE_LOADED = 3, 6  # CUpti_CallbackDomain, CUpti_CallbackIdResource
_CALLBACK = CFUNCTYPE(None, c_void_p, c_int, c_uint32, c_void_p)


class _Module(ctypes.Structure):
    _fields_ = (("number", c_uint32), ("size", c_size_t), ("cubin", c_void_p))


class _Resource(ctypes.Structure):
    _fields_ = (("context", c_void_p), ("handle", c_void_p), ("module", POINTER(_Module)))


class ModuleRecorder:
    """Keeps what is loaded while it is open. Open it before the first CUDA call: what is loaded earlier is not told.

    CUPTI has one user in a process, so no profiler may run beside it; and kernels are loaded lazily, so each must have
    been launched once. Raises DeviceError where there is no CUPTI.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        self._images: list[bytes] = []
        try:
            self._cupti = ctypes.CDLL(library)
        except OSError as error:
            raise DeviceError(
                f"CUPTI cannot be loaded ({error}); expected {library}, from pip install nvidia-cuda-cupti"
            ) from None
        self._callback = _CALLBACK(self._loaded)
        self._subscriber = c_void_p()
        self._call("cuptiSubscribe", byref(self._subscriber), self._callback, None)
        self._call("cuptiEnableCallback", c_uint32(1), self._subscriber, c_int(_RESOURCE), c_uint32(_MODULE_LOADED))

    def __enter__(self) -> ModuleRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def images(self) -> ImageStore:
        """What was loaded so far."""
        store = ImageStore()
        for image in self._images:
            try:
                store.add(image)
            except StateError as error:
                logger.info("a loaded module is left out: %s", error)
        return store

    def close(self) -> None:
        if self._subscriber:
            self._cupti.cuptiUnsubscribe(self._subscriber)
            self._subscriber = c_void_p()

    def _loaded(self, _: object, domain: int, number: int, data: int) -> None:
        # The driver holds its locks here: copy, and call nothing.
        if domain == _RESOURCE and number == _MODULE_LOADED:
            module = ctypes.cast(data, POINTER(_Resource)).contents.module.contents
            if module.cubin:
                self._images.append(ctypes.string_at(module.cubin, module.size))

    def _call(self, function: str, *arguments: Any) -> None:
        result = getattr(self._cupti, function)(*arguments)
        if result:
            text = c_char_p()
            describe = getattr(self._cupti, "cuptiGetResultString", None)
            if describe is not None:
                describe(result, byref(text))
            reason = (text.value or b"").decode() or f"error {result}"
            raise DeviceError(f"{function} failed: {reason}; run no profiler in the same process")
