"""The compiled kernels, called through ctypes: no Python headers at build time, and the GIL is free while they run."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_runtime.kernels.build import LIBRARY_NAME

DTYPES = {torch.bfloat16: 0, torch.float16: 1}  # the enum in linear.h
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int


class UnavailableError(Exception):
    """There is no compiled kernel here; the message says why."""


class NativeKernels:
    """The library on torch's threads. ``instruction_set`` is 256 (AVX2) or 512 (AVX-512F), which the CPU must have.

    libtorch_cpu is asked for the GOMP_parallel it uses itself (GNU, LLVM and Intel runtimes all have it), so no second
    pool of threads competes with the first.
    """

    def __init__(self, instruction_set: int, path: Path | None = None) -> None:
        path = path or Path(__file__).with_name(LIBRARY_NAME)
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise UnavailableError(f"{error}; `python -m medusa_runtime.kernels.build` makes it") from error
        parallel = _torch_parallel()
        self.threads = "torch's threads" if parallel else "one thread, as torch's OpenMP runtime was not found"
        library.medusa_configure.argtypes = [_INT, _POINTER]
        library.medusa_configure(instruction_set, parallel)
        self._linear: Any = library.medusa_linear
        self._linear.argtypes = [_POINTER] * 4 + [_LONG] * 5 + [_INT] * 2

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [rows, depth] @ weight [cols, depth]^T → [rows, cols]; of one 16-bit dtype, rows contiguous."""
        rows, depth = x.shape
        cols = weight.shape[0]
        out = x.new_empty(rows, cols)
        if self._linear(
            out.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            rows,
            cols,
            depth,
            x.stride(0),
            weight.stride(0),
            DTYPES[x.dtype],
            torch.get_num_threads(),
        ):
            raise MemoryError(f"no memory for the scratch space of a product of {rows} rows and depth {depth}")
        return out


def _torch_parallel() -> int | None:
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.GOMP_parallel, _POINTER).value
    except (OSError, AttributeError):
        return None
