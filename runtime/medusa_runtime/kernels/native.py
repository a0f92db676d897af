"""The compiled kernels, called through ctypes: building needs no Python headers, and they run without the GIL."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from medusa_runtime.compiled_library import LIBRARY

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # the enum in dtype.h
MAX_HEAD_DIM = 256  # attention.h
MAX_TAPS = 16  # recurrence.h
INPUTS = 16  # how many inputs a program has: INPUTS in program.c
_SCALE_DTYPES = {**DTYPES, torch.float8_e8m0fnu: 3}  # and in codes.h
# ggml's formats: the enum packing in codes.h, behind those that Codes uses.
BLOCK_PACKINGS = {
    kind: number
    for number, kind in enumerate(
        (
            "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
        ),
        9,
    )
}  # fmt: skip
_NIBBLES, _BYTES = 3, 4  # results of medusa_dequantize that are no floats: the enum in codes.h
LANES = 8  # sizes in the steps between products (pointwise.c) are multiples of it
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int


class UnavailableError(Exception):
    """The compiled kernels cannot be loaded; the message says why."""


class _Part(ctypes.Structure):
    """struct linear_part in linear.h."""

    _fields_: ClassVar = [
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("cols", _LONG),
        ("weight_stride", _LONG),
        ("codes", _POINTER),
    ]


class _Pool(ctypes.Structure):
    _fields_: ClassVar = [("data", _POINTER), ("block_stride", _LONG), ("slot_stride", _LONG), ("head_stride", _LONG)]


class _Attention(ctypes.Structure):
    """struct attention in attention.h."""

    _fields_: ClassVar = [
        ("q", _POINTER),
        ("out", _POINTER),
        ("sinks", _POINTER),
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


class _Steps(ctypes.Structure):
    _fields_: ClassVar = [("slots", _POINTER), ("begins", _POINTER), ("starts", _POINTER), ("count", _LONG)]

    @classmethod
    def of(cls, steps: Steps) -> _Steps:
        return cls(*(each.data_ptr() for each in steps), len(steps.slots))


class _Convolution(ctypes.Structure):
    """struct convolution in recurrence.h."""

    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("out", "x", "weight", "bias", "states")),
        *((name, _LONG) for name in ("stride", "channels", "taps")),
        ("steps", _Steps),
    ]


class _Recurrence(ctypes.Structure):
    """struct recurrence in recurrence.h."""

    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("out", "q", "k", "v", "decay", "rate", "states")),
        *((name, _LONG) for name in ("heads", "key_heads", "key_dim", "value_dim")),
        ("steps", _Steps),
    ]


class Steps(NamedTuple):
    """Which sequences a step's tokens belong to, sequence by sequence, for layers that keep states; all int64.

    slots: [sequences], where the state of each is. begins: [sequences], how many of its tokens came before; with 0, the
    state is taken for zeros. starts: [sequences + 1], its first row among the step's tokens.
    """

    slots: Tensor
    begins: Tensor
    starts: Tensor


class _Codes(ctypes.Structure):
    """struct codes in codes.h."""

    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("values", "scale", "zero", "group_of", "table", "order", "out")),
        *((name, _LONG) for name in ("rows", "columns", "high", "wide", "scale_columns")),
        *((name, _INT) for name in ("one_zero", "packing", "transposed", "dtype", "scale_dtype", "zero_dtype")),
    ]


class StoredCodes:
    """A quantized matrix of ``shape`` as the kernels take it. codes.h explains the arguments.

    ``size`` is that of the blocks that share a scale. All tensors are contiguous, scale and zero in bf16, fp16, fp32 or
    E8M0, and ``group_of`` is int64 and within bounds. With ``order`` (int64 [columns]), column i of the matrix belongs
    to the input's element ``order[i]``. ggml's blocks (``BLOCK_PACKINGS``) have their scales inside: ``scale`` is None.
    """

    def __init__(
        self,
        values: Tensor,
        scale: Tensor | None,
        *,
        shape: tuple[int, int],
        packing: int,
        size: tuple[int, int],
        zero: Tensor | None = None,
        group_of: Tensor | None = None,
        table: Tensor | None = None,
        transposed: bool = False,
        order: Tensor | None = None,
    ) -> None:
        self.shape, self.order = shape, order
        self._tensors = (values, scale, zero, group_of, table)  # kept alive, as the structure has only their addresses
        self._struct = _Codes(
            values=values.data_ptr(),
            scale=None if scale is None else scale.data_ptr(),
            zero=None if zero is None else zero.data_ptr(),
            group_of=None if group_of is None else group_of.data_ptr(),
            table=None if table is None else table.data_ptr(),
            rows=shape[0],
            columns=shape[1],
            high=size[0],
            wide=size[1],
            scale_columns=0 if scale is None else scale.shape[1],
            one_zero=zero is not None and zero.numel() == 1,
            packing=packing,
            transposed=transposed,
            scale_dtype=0 if scale is None else _SCALE_DTYPES[scale.dtype],
            zero_dtype=0 if zero is None else _SCALE_DTYPES[zero.dtype],
        )
        self.address = ctypes.addressof(self._struct)

    @property
    def block_rows(self) -> int:
        """How many rows share a scale."""
        return int(self._struct.high)

    def job(self, out: Tensor, first_row: int, dtype: int) -> _Codes:
        """Return the structure for the rows from ``first_row`` on, as many as ``out`` has, with where the floats go."""
        values, scale, zero, *_ = self._tensors
        job = _Codes.from_buffer_copy(self._struct)
        job.out, job.dtype = out.data_ptr(), dtype
        if first_row or not job.transposed:
            job.rows = out.shape[0]
            job.values += first_row * values.stride(0) * values.element_size()
            if scale is None:
                return job
            line = first_row // job.high * scale.stride(0)
            job.scale += line * scale.element_size()
            if zero is not None and not job.one_zero:
                job.zero += line * zero.element_size()
        return job


class NativeKernels:
    """The loaded library of compiled kernels.

    ``instruction_set``, which the CPU must have, is 256 (AVX2), 512 (AVX-512F) or 128 (NEON). With ``bf16_dots`` it
    also has AVX-512's or NEON's dot products of bf16, with ``byte_dots`` NEON's of bytes, and products use them.

    The library has threads of its own (parallel.h says why), as many as torch is set to use. They sleep when there is
    no work.
    """

    def __init__(
        self, instruction_set: int, path: Path | None = None, *, bf16_dots: bool = False, byte_dots: bool = False
    ) -> None:
        from medusa_runtime.kernels.build import INTERFACE  # here: `python -m` warns of a module that is imported

        path = path or LIBRARY
        try:
            library = ctypes.CDLL(str(path))
            if (found := library.medusa_interface()) != INTERFACE:
                raise UnavailableError(
                    f"{path.name} was built from other sources: expected interface {INTERFACE}, found {found}; "
                    "`python -m medusa_runtime.kernels.build` makes it"
                )
            # These take microseconds: releasing and taking the interpreter's lock would take longer.
            short = ctypes.PyDLL(str(path))
            self._products: Any = library.medusa_products
            self._attention: Any = library.medusa_attention
            self._dequantize: Any = library.medusa_dequantize
            self._gather: Any = library.medusa_gather
            self.run: Any = library.medusa_run  # recording.py has its arguments
            self._norm: Any = short.medusa_norm
            self._rope: Any = short.medusa_rope
            self._gate: Any = short.medusa_gate
            self._add: Any = short.medusa_add
            self._write_kv: Any = short.medusa_write_kv
            self._convolve: Any = library.medusa_convolve
            self._recur: Any = library.medusa_recur
        except (OSError, AttributeError) as error:
            raise UnavailableError(f"{error}; `python -m medusa_runtime.kernels.build` makes it") from error
        self.instruction_set = instruction_set
        self.bf16_dots = bf16_dots
        library.medusa_configure(instruction_set, int(bf16_dots), int(byte_dots))
        self._products.argtypes = [_POINTER, _POINTER, _POINTER, _LONG, _POINTER, *[_LONG] * 4, _INT, _INT]
        self._norm.argtypes = [_POINTER] * 3 + [_LONG] * 5 + [ctypes.c_float] * 2 + [_INT] * 3
        self._rope.argtypes = [_POINTER] * 4 + [_LONG] * 7 + [_INT] * 2
        self._gate.argtypes = [_POINTER] * 3 + [_LONG] * 4 + [_INT] * 2
        self._add.argtypes = [_POINTER] * 3 + [_LONG] + [_INT] * 2
        self._write_kv.argtypes = [_POINTER] * 5 + [_LONG] * 4
        self.run.argtypes = [_POINTER, _LONG, _POINTER, _INT]
        self._convolve.argtypes = [ctypes.POINTER(_Convolution), _INT, _INT]
        self._recur.argtypes = [ctypes.POINTER(_Recurrence), _INT]
        for function in (
            self._norm, self._rope, self._gate, self._add, self._write_kv, self._convolve, self._recur,
        ):  # fmt: skip
            function.restype = None
        self._dequantize.argtypes, self._dequantize.restype = [ctypes.POINTER(_Codes), _INT], None
        self._gather.argtypes, self._gather.restype = [ctypes.POINTER(_Codes), _POINTER, _LONG, _INT], _LONG
        self._attention.argtypes = [ctypes.POINTER(_Attention), _INT, _INT]

    def products(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], residual: Tensor | None = None
    ) -> Tensor:
        """Return x [rows, depth] @ each weight [cols, depth]^T + its bias, concatenated → [rows, all cols].

        All have one dtype and contiguous rows, or all weights are ``QuantizedParameter``. With a single weight,
        ``residual`` [rows, cols] is added to the rounded product. Raises MemoryError if there is no memory for scratch
        space.
        """
        rows, depth = x.shape
        parts = (_Part * len(weights))()
        cols = 0
        for part, weight, bias in zip(parts, weights, biases, strict=True):
            codes: StoredCodes | None = getattr(weight, "codes", None)
            if codes is None:
                part.weight, part.cols, part.weight_stride = weight.data_ptr(), weight.shape[0], weight.stride(0)
            else:
                part.codes, part.cols = codes.address, codes.shape[0]
            if bias is not None:
                part.bias = bias.data_ptr()
            cols += part.cols
        out = x.new_empty(rows, cols)
        if self._products(
            out.data_ptr(),
            x.data_ptr(),
            parts,
            len(parts),
            None if residual is None else residual.data_ptr(),
            rows,
            depth,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            DTYPES[x.dtype],
            torch.get_num_threads(),
        ):
            raise MemoryError(f"no memory for the scratch space of a product of {rows} rows and depth {depth}")
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [rows, depth] @ weight [cols, depth]^T → [rows, cols]; both have one dtype and contiguous rows."""
        return self.products(x, (weight,), (bias,))

    def norm(self, x: Tensor, weight: Tensor, eps: float, *, once: bool, offset: float) -> Tensor:
        """Return ``pointwise.rms_norm`` of x [tokens, size] or [tokens, heads, size].

        The last dimension is contiguous, and its size a multiple of 8.
        """
        tokens, heads, size = x.shape if x.dim() == 3 else (x.shape[0], 1, x.shape[1])
        out = x.new_empty(x.shape)
        item = x.element_size()
        layout = (tokens * heads, size, heads, x.stride(0) * item, x.stride(-2) * item)
        places = (out.data_ptr(), x.data_ptr(), weight.data_ptr())
        self._norm(*places, *layout, eps, offset, once, DTYPES[x.dtype], torch.get_num_threads())
        return out

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate q and k in place; heads are contiguous, cos and sin [tokens, 1, size] with a size divisible by 16."""
        tokens, heads, head_dim = q.shape
        item = q.element_size()
        self._rope(
            q.data_ptr(),
            k.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            tokens,
            heads,
            k.shape[1],
            head_dim,
            cos.shape[2],
            q.stride(0) * item,
            k.stride(0) * item,
            DTYPES[q.dtype],
            torch.get_num_threads(),
        )

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up, each [rows, size], with contiguous rows and a size that is a multiple of 8."""
        rows, size = gate.shape
        out = gate.new_empty(rows, size)
        item = gate.element_size()
        self._gate(
            out.data_ptr(),
            gate.data_ptr(),
            up.data_ptr(),
            rows,
            size,
            gate.stride(0) * item,
            up.stride(0) * item,
            DTYPES[gate.dtype],
            torch.get_num_threads(),
        )
        return out

    def add(self, one: Tensor, other: Tensor, out: Tensor) -> None:
        """Write one + other to ``out``. All are contiguous and have one shape, with a multiple of 8 elements."""
        places = (out.data_ptr(), one.data_ptr(), other.data_ptr())
        self._add(*places, one.numel(), DTYPES[one.dtype], torch.get_num_threads())

    def write_kv(self, keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v [tokens, kv_heads, head_dim] to slots of contiguous pools [slots, kv_heads, head_dim]."""
        item = k.element_size()
        self._write_kv(
            keys.data_ptr(),
            values.data_ptr(),
            slots.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            k.shape[0],
            k.shape[1] * k.shape[2] * item,
            k.stride(0) * item,
            v.stride(0) * item,
        )

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
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the same as ``paged_attention``. All on the CPU, q contiguous within a token, integers int32."""
        out = torch.empty(q.shape, dtype=q.dtype)
        job = _Attention(
            q=q.data_ptr(),
            out=out.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
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

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, steps: Steps) -> Tensor:
        """Return ``recurrence.convolve``. Rows of x are contiguous, as are all others; channels are a multiple of 8."""
        out = torch.empty(x.shape, dtype=x.dtype)
        job = _Convolution(
            out=out.data_ptr(),
            x=x.data_ptr(),
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            states=states.data_ptr(),
            stride=x.stride(0) * x.element_size(),
            channels=weight.shape[0],
            taps=weight.shape[1],
            steps=_Steps.of(steps),
        )
        self._convolve(job, DTYPES[x.dtype], torch.get_num_threads())
        return out

    def recur(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor | None, states: Tensor, steps: Steps
    ) -> Tensor:
        """Return ``recurrence.recur``. All are contiguous, and key_dim and value_dim are multiples of 8."""
        out = torch.empty(v.shape, dtype=torch.float32)
        job = _Recurrence(
            out=out.data_ptr(),
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            decay=decay.data_ptr(),
            rate=None if rate is None else rate.data_ptr(),
            states=states.data_ptr(),
            heads=v.shape[1],
            key_heads=q.shape[1],
            key_dim=q.shape[2],
            value_dim=v.shape[2],
            steps=_Steps.of(steps),
        )
        self._recur(job, torch.get_num_threads())
        return out

    def dequantize(self, codes: StoredCodes, out: Tensor, *, first_row: int = 0) -> None:
        """Fill ``out`` [rows, columns] with the floats of the rows from ``first_row`` on.

        ``out`` is [columns, rows] if the codes are transposed; these are always dequantized as a whole. ``first_row``
        is a multiple of the rows that share a scale, unless all do.
        """
        self._dequantize(codes.job(out, first_row, DTYPES[out.dtype]), torch.get_num_threads())

    def gather(self, codes: StoredCodes, rows: Tensor, out: Tensor) -> None:
        """Fill ``out`` [n, columns] with the floats of these rows, contiguous int64 [n]; codes are not transposed.

        Raises IndexError if one of them is no row.
        """
        job = codes.job(out, 0, DTYPES[out.dtype])
        job.rows = codes.shape[0]
        found = self._gather(job, rows.data_ptr(), len(rows), torch.get_num_threads())
        if found < len(rows):
            raise IndexError(f"expected rows from 0 to {codes.shape[0] - 1}, found {int(rows[found])}")

    def transpose(self, codes: StoredCodes, out: Tensor, order: Tensor | None = None) -> None:
        """Fill ``out`` with the integers of transposed codes: uint8 [columns, rows], or [columns, rows / 2] nibbles.

        With ``order`` (int64 [rows]), column i of the result is the stored row ``order[i]``.
        """
        job = codes.job(out, 0, _NIBBLES if out.shape[1] * 2 == codes.shape[0] else _BYTES)
        job.order = None if order is None else order.data_ptr()
        self._dequantize(job, torch.get_num_threads())


def _pool(pool: Tensor) -> _Pool:
    block, slot, head, _ = (stride * pool.element_size() for stride in pool.stride())
    return _Pool(pool.data_ptr(), block, slot, head)
