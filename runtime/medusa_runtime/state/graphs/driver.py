"""The part of libcuda that graphs need, with typed calls and named errors."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

from ...device.driver import LIBRARY, Driver
from ...errors import DeviceError

OUT_OF_MEMORY, INVALID_VALUE = 2, 1
HOST_MEMORY = 1  # CU_MEMORYTYPE_HOST
RELAXED_CAPTURE = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

_LETTERS: dict[str, Any] = {
    "p": c_void_p,  # a handle or a pointer; None and byref() are accepted too
    "i": c_int,
    "u": ctypes.c_uint,
    "b": ctypes.c_ubyte,
    "z": c_size_t,
    "q": c_uint64,  # a device pointer
    "s": c_char_p,
}

# Functions with their argument types. A suffix (_v2) is part of today's ABI: the plain names are older functions with
# other structures, and cuda.h redefines them.
SIGNATURES = {
    "cuInit": "u",
    "cuDriverGetVersion": "p",
    "cuDeviceGet": "pi",
    "cuDeviceGetName": "pii",
    "cuDeviceGetAttribute": "pii",
    "cuDevicePrimaryCtxRetain": "pi",
    "cuCtxSetCurrent": "p",
    "cuCtxGetCurrent": "p",
    "cuCtxGetDevice": "p",
    "cuCtxSynchronize": "",
    "cuThreadExchangeStreamCaptureMode": "p",
    "cuStreamCreate": "pu",
    "cuStreamSynchronize": "p",
    "cuMemGetInfo_v2": "pp",
    "cuMemcpyHtoD_v2": "qpz",
    "cuMemcpyDtoH_v2": "pqz",
    "cuMemsetD8_v2": "qbz",
    "cuPointerGetAttribute": "piq",
    "cuMemGetAllocationGranularity": "ppi",
    "cuMemAddressReserve": "pzzqq",
    "cuMemAddressFree": "qz",
    "cuMemCreate": "pzpq",
    "cuMemRelease": "q",
    "cuMemMap": "qzzqq",
    "cuMemSetAccess": "qzpz",
    "cuMemUnmap": "qz",
    "cuLibraryLoadData": "ppppuppu",
    "cuLibraryUnload": "p",
    "cuLibraryGetKernel": "pps",
    "cuLibraryGetKernelCount": "pp",
    "cuLibraryEnumerateKernels": "pup",
    "cuLibraryGetGlobal": "ppps",
    "cuModuleGetGlobal_v2": "ppps",
    "cuModuleGetFunctionCount": "pp",
    "cuModuleEnumerateFunctions": "pup",
    "cuKernelGetName": "pp",
    "cuKernelGetFunction": "pp",
    "cuKernelGetLibrary": "pp",
    "cuKernelGetParamInfo": "pzpp",
    "cuKernelGetAttribute": "pipi",
    "cuKernelSetAttribute": "iipi",
    "cuFuncGetName": "pp",
    "cuFuncGetModule": "pp",
    "cuFuncGetParamInfo": "pzpp",
    "cuFuncGetAttribute": "pip",
    "cuFuncSetAttribute": "pii",
    "cuTensorMapReplaceAddress": "pp",
    "cuGraphCreate": "pu",
    "cuGraphDestroy": "p",
    "cuGraphGetNodes": "ppp",
    "cuGraphGetEdges_v2": "ppppp",
    "cuGraphNodeGetType": "pp",
    "cuGraphKernelNodeGetParams_v2": "pp",
    "cuGraphMemsetNodeGetParams": "pp",
    "cuGraphMemcpyNodeGetParams": "pp",
    "cuGraphKernelNodeGetAttribute": "pip",
    "cuGraphKernelNodeSetAttribute": "pip",
    "cuGraphAddKernelNode_v2": "pppzp",
    "cuGraphAddMemsetNode": "pppzpp",
    "cuGraphAddMemcpyNode": "pppzpp",
    "cuGraphAddEmptyNode": "pppz",
    "cuGraphAddDependencies_v2": "ppppz",
    "cuGraphInstantiateWithParams": "ppp",
    "cuGraphLaunch": "pp",
    "cuGraphExecDestroy": "p",
}


# Errors after which the context cannot be used any more (cuda.h): contained memory errors, faults of a kernel, its
# timeout, a failed assertion in it (such as torch's checks of indices), and faults outside the device.
STICKY = (226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 911)


class CudaError(DeviceError):
    """A driver call failed. ``function`` and ``result`` (the CUresult) say which and how."""

    def __init__(self, function: str, result: int, reason: str) -> None:
        super().__init__(f"{function} failed: {reason}")
        self.function = function
        self.result = result

    @property
    def sticky(self) -> bool:
        """Whether the error broke the context, so that nothing works on this device in this process any more."""
        return self.result in STICKY


class CudaDriver(Driver):
    """libcuda with argument types. Raises DeviceError if there is no driver, and CudaError if a call fails."""

    def __init__(self, file: str = LIBRARY) -> None:
        super().__init__(file)
        self._bound: dict[str, Any] = {}

    def bind(self, function: str) -> Any:
        """Return the function itself, which returns its CUresult. This is for loops of tens of thousands of calls."""
        bound = self._bound.get(function)
        if bound is None:
            try:
                bound = getattr(self._functions, function)
            except AttributeError:
                raise DeviceError(f"{self.file} has no {function}; expected the driver of CUDA 12.4 or newer") from None
            bound.argtypes = [_LETTERS[letter] for letter in SIGNATURES[function]]
            self._bound[function] = bound
        return bound

    def check(self, function: str, code: int) -> None:
        """Raise CudaError for a CUresult of this function that is not 0."""
        if code:
            raise CudaError(function, code, self._name(code))

    def result(self, function: str, *arguments: Any) -> int:
        """Call a function that may fail, and return its CUresult."""
        return int(self.bind(function)(*arguments))

    def call(self, function: str, *arguments: Any) -> None:
        self.check(function, self.result(function, *arguments))

    def handle(self, function: str, *arguments: Any) -> int:
        """Call a function that writes a handle or an address to its first argument, and return that."""
        made = c_uint64()
        self.call(function, byref(made), *arguments)
        return made.value

    def optional(self, function: str, *arguments: Any) -> int:
        """Do the same as ``handle``, but return 0 if the driver refuses, or is too old to have this function."""
        made = c_uint64()
        if not hasattr(self._functions, function):
            return 0
        return 0 if self.result(function, byref(made), *arguments) else made.value

    def text(self, function: str, handle: int) -> str:
        """Call a function that returns a name, which the driver owns."""
        name = c_char_p()
        self.call(function, byref(name), handle)
        return (name.value or b"").decode()

    def current_context(self) -> int:
        """Return the current context of this thread. Raises DeviceError if there is none."""
        context = self.handle("cuCtxGetCurrent")
        if not context:
            raise DeviceError("expected a current CUDA context in this thread, found none; retain the device's first")
        return context

    def use_in_thread(self, context: int) -> None:
        """Make a context current in this thread, whose calls are then no part of what another one may be capturing."""
        self.call("cuCtxSetCurrent", context)
        self.call("cuThreadExchangeStreamCaptureMode", byref(c_int(RELAXED_CAPTURE)))

    def current_device(self) -> int:
        device = c_int()
        self.call("cuCtxGetDevice", byref(device))
        return device.value

    def read(self, address: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", buffer, address, size)
        return buffer.raw

    def write(self, address: int, data: bytes) -> None:
        self.call("cuMemcpyHtoD_v2", address, ctypes.cast(c_char_p(data), c_void_p), len(data))
        self._finish()

    def fill(self, address: int, value: int, size: int) -> None:
        self.call("cuMemsetD8_v2", address, value, size)
        self._finish()

    def _finish(self) -> None:
        """Wait for a copy or a fill to end: the call may return early, and torch does not wait for its stream."""
        self.call("cuStreamSynchronize", None)

    def range_of(self, address: int) -> tuple[int, int] | None:
        """Return the start and size of the device allocation that contains this address; None if there is none."""
        start, size = c_uint64(), c_uint64()
        if self.result("cuPointerGetAttribute", byref(start), 11, address):
            return None
        if self.result("cuPointerGetAttribute", byref(size), 12, address):
            return None
        return start.value, size.value

    def on_host(self, address: int) -> bool:
        """Return whether the address is in host memory that the device can read, such as pinned pages."""
        kind = c_int()
        return not self.result("cuPointerGetAttribute", byref(kind), 2, address) and kind.value == HOST_MEMORY

    def _name(self, code: int) -> str:
        text = c_char_p()
        self._functions.cuGetErrorName(code, byref(text))
        return f"{text.value.decode()} ({code})" if text.value else f"error {code}"
