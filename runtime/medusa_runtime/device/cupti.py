"""Record the kernel images that the driver loads, by means of CUPTI. This is done offline only.

CUPTI reports every module, whether torch, cuBLAS or triton loads it, or code that is compiled at run time. For cubins
that are loaded on their own (such as triton's, Inductor's, and those that cuBLAS generates), it also reports the
handle, which distinguishes kernels of the same name. Start the recorder before anything runs on the device, because
modules that were loaded earlier are not reported.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from ..errors import DeviceError
from .compiling import compile_library
from .driver import Driver

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("module_recorder.c")
_RESOURCE, _MODULE_LOADED = 3, 6  # CUPTI_CB_DOMAIN_RESOURCE, CUPTI_CBID_RESOURCE_MODULE_LOADED
_DRIVER_API = 1  # CUPTI_CB_DOMAIN_DRIVER_API
# CUPTI_DRIVER_TRACE_CBID_: cuModuleLoad (which reads a file, and loads Inductor's kernels), cuModuleLoadData,
# cuModuleLoadDataEx, cuLibraryLoadData
_LOADS = (18, 19, 20, 678)
_NAMES = ("libcupti.so.13", "libcupti.so.12", "libcupti.so")


class _Module(ctypes.Structure):
    """CUPTI's structure ``CUpti_ModuleResourceData``."""

    _fields_ = (("number", ctypes.c_uint32), ("size", ctypes.c_size_t), ("image", ctypes.c_void_p))


class _Resource(ctypes.Structure):
    """CUPTI's structure ``CUpti_ResourceData``."""

    _fields_ = (("context", ctypes.c_void_p), ("handle", ctypes.c_void_p), ("described", ctypes.POINTER(_Module)))


class ModuleRecorder:
    """Collects each image that is loaded while it is open, once, in ``images``.

    ``handles`` maps a CUmodule or CUlibrary to the SHA-256 of its image, in hexadecimal. A process can have only one
    subscriber of CUPTI, so no profiler can run beside the recorder. If there is no driver or no CUPTI, or CUPTI
    refuses, ``error`` says why nothing is recorded; kernels are then found by triggering.
    """

    def __init__(self, library: str | None = None) -> None:
        self._subscriber = ctypes.c_void_p()
        self._images: dict[bytes, bytes] = {}
        self._handles: dict[int, str] = {}
        self._taken = 0
        self._native = _compiled()
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_Resource))
        # Kept alive, because CUPTI calls it until the end. Without a C compiler it is a function in Python, which works
        # only in a single thread.
        self._callback = kind(self._loaded) if self._native is None else self._native.medusa_module_loaded
        self.error: DeviceError | None = None
        try:
            if library is None:
                Driver()  # without a driver, each function of CUDA 13.2's CUPTI calls itself until the stack overflows
            self._cupti = _load(library)
            self._call("cuptiSubscribe", ctypes.byref(self._subscriber), self._callback, None)
            self._call("cuptiEnableCallback", ctypes.c_uint32(1), self._subscriber, _RESOURCE, _MODULE_LOADED)
            for call in _LOADS if self._native is not None else ():
                self._call("cuptiEnableCallback", ctypes.c_uint32(1), self._subscriber, _DRIVER_API, call)
        except DeviceError as error:
            self.error = error
            logger.warning("%s", error)

    @property
    def images(self) -> list[bytes]:
        self._take()
        return list(self._images.values())

    @property
    def handles(self) -> dict[int, str]:
        self._take()
        return dict(self._handles)

    def _take(self) -> None:
        size, handle = ctypes.c_size_t(), ctypes.c_void_p()
        while self._native is not None and (
            at := self._native.medusa_module(self._taken, ctypes.byref(size), ctypes.byref(handle))
        ):
            digest = self._add(ctypes.string_at(at, size.value))
            if handle.value:
                self._handles[handle.value] = digest.hex()  # a handle may be used again: its last image counts
            self._taken += 1

    def close(self) -> None:
        """Stop recording. May be called twice."""
        subscriber, self._subscriber = self._subscriber, ctypes.c_void_p()
        if subscriber:
            self._call("cuptiUnsubscribe", subscriber)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _loaded(self, user: Any, domain: int, number: int, resource: Any) -> None:
        """Copy an image. CUPTI calls this in the thread that loads it, so it must not call CUDA or torch."""
        module = resource.contents.described
        if module and module.contents.image and module.contents.size:
            self._add(ctypes.string_at(module.contents.image, module.contents.size))

    def _add(self, image: bytes) -> bytes:
        digest = hashlib.sha256(image).digest()
        self._images.setdefault(digest, image)
        return digest

    def _call(self, function: str, *arguments: Any) -> None:
        result = getattr(self._cupti, function)(*arguments)
        if result:
            text = ctypes.c_char_p()
            self._cupti.cuptiGetResultString(result, ctypes.byref(text))
            reason = text.value.decode() if text.value else "unknown"
            raise DeviceError(f"{function} failed: {reason} ({result}); kernel images cannot be recorded")


def _compiled() -> ctypes.CDLL | None:
    """Compile the callback in C, and return its library; None without a compiler."""
    try:
        with compile_library(_SOURCE) as library:
            native = ctypes.CDLL(str(library))
    except (DeviceError, OSError) as error:
        logger.info("kernel images are recorded by Python: %s", error)
        return None
    native.medusa_module.restype = ctypes.c_void_p
    native.medusa_module.argtypes = (ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
    return native


def _load(library: str | None) -> ctypes.CDLL:
    candidates = [library] if library else [*map(str, _installed()), *_NAMES]
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise DeviceError(f"expected CUPTI ({', '.join(_NAMES)}), found none; it comes with torch for CUDA")


def _installed() -> Iterator[Path]:
    """Yield the paths of CUPTI in the packages that torch depends on: nvidia/cu13/lib, nvidia/cuda_cupti/lib."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        yield from sorted(Path(folder).glob("*/lib/libcupti.so*"))


__all__ = ["ModuleRecorder"]
