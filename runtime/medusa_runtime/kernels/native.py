"""The compiled kernels, called through ctypes: no Python headers at build time, and the GIL is free while they run."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from medusa_runtime.kernels.build import LIBRARY_NAME

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # the enum in dtype.h
MAX_HEAD_DIM = 256  # attention.h
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int


class UnavailableError(Exception):
    """There is no compiled kernel here; the message says why."""


class _Pool(ctypes.Structure):
    _fields_: ClassVar = [("data", _POINTER), ("block_stride", _LONG), ("slot_stride", _LONG), ("head_stride", _LONG)]


class _Attention(ctypes.Structure):
    """struct attention in attention.h."""

    _fields_: ClassVar = [
        ("q", _POINTER),
        ("out", _POINTER),
        ("keys", _Pool),
        ("values", _Pool),
        ("block_tables", _POINTER),
        ("sequences", _POINTER),
        ("contexts", _POINTER),
        ("q_stride", _LONG),
        ("block_table_stride", _LONG),
        ("tokens", _LONG),
        ("heads", _LONG),
        ("kv_heads", _LONG),
        ("head_dim", _LONG),
        ("block_size", _LONG),
        ("window", _LONG),
        ("scale", ctypes.c_float),
    ]


class NativeKernels:
    """The library. ``instruction_set`` is 256 (AVX2) or 512 (AVX-512F), which the CPU must have.

    It has threads of its own (parallel.h says why), as many as torch is set to use, asleep when there is nothing to do.
    """

    def __init__(self, instruction_set: int, path: Path | None = None) -> None:
        path = path or Path(__file__).with_name(LIBRARY_NAME)
        try:
            library = ctypes.CDLL(str(path))
            self._linear: Any = library.medusa_linear
            self._attention: Any = library.medusa_attention
        except (OSError, AttributeError) as error:
            raise UnavailableError(f"{error}; `python -m medusa_runtime.kernels.build` makes it") from error
        self.instruction_set = instruction_set
        library.medusa_configure(instruction_set)
        self._linear.argtypes = [_POINTER] * 4 + [_LONG] * 5 + [_INT] * 2
        self._attention.argtypes = [ctypes.POINTER(_Attention), _INT, _INT]

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

    def attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        block_tables: Tensor,
        sequences: Tensor,
        contexts: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """See paged_attention; all on the CPU, q's heads and the last dimensions contiguous, the integers int32."""
        out = torch.empty(q.shape, dtype=q.dtype)
        job = _Attention(
            q=q.data_ptr(),
            out=out.data_ptr(),
            keys=_pool(keys),
            values=_pool(values),
            block_tables=block_tables.data_ptr(),
            sequences=sequences.data_ptr(),
            contexts=contexts.data_ptr(),
            q_stride=q.stride(0) * q.element_size(),
            block_table_stride=block_tables.stride(0),
            tokens=q.shape[0],
            heads=q.shape[1],
            kv_heads=keys.shape[2],
            head_dim=q.shape[2],
            block_size=keys.shape[1],
            window=window or 0,
            scale=scale,
        )
        if self._attention(job, DTYPES[q.dtype], torch.get_num_threads()):
            raise MemoryError(f"no memory for the attention of {q.shape[0]} tokens")
        return out


def _pool(pool: Tensor) -> _Pool:
    block, slot, head, _ = (stride * pool.element_size() for stride in pool.stride())
    return _Pool(pool.data_ptr(), block, slot, head)
