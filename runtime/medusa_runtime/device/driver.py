"""The CUDA driver, called with ctypes by code that must not wait until torch is imported."""

from __future__ import annotations

import ctypes
from typing import Any

from ..errors import DeviceError

LIBRARY = "libcuda.so.1"


class Driver:
    """A loaded driver library. Its calls release the interpreter's lock, so they overlap with imports."""

    def __init__(self, file: str = LIBRARY) -> None:
        """Load the library without initializing it. Raises DeviceError if there is no driver."""
        self.file = file
        try:
            self._functions = ctypes.CDLL(file)
        except OSError as error:
            raise DeviceError(
                f"the CUDA driver cannot be loaded ({error}); expected {file}, which the NVIDIA container toolkit "
                "puts into a container. Give the container a GPU, or use --device cpu"
            ) from None

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function that returns a CUresult. Raises DeviceError with its name and the driver's reason."""
        self.check(function, self._function(function)(*arguments))

    def check(self, function: str, code: int) -> None:
        """Raise DeviceError for a CUresult of this function that is not 0."""
        if code:
            raise DeviceError(f"{function} failed: {self._reason(code)}; `nvidia-smi` shows the state of the GPU")

    def address(self, function: str) -> int:
        """Return where a function is, for compiled code that calls it. DeviceError if this driver does not have it."""
        return ctypes.cast(self._function(function), ctypes.c_void_p).value or 0

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._functions, name)
        except AttributeError:
            raise DeviceError(f"{self.file} has no {name}; expected a driver of CUDA 11 or newer") from None

    def _reason(self, result: int) -> str:
        text = ctypes.c_char_p()
        try:
            self._functions.cuGetErrorString(result, ctypes.byref(text))
        except AttributeError:
            pass
        return f"{text.value.decode()} ({result})" if text.value else f"error {result}"
