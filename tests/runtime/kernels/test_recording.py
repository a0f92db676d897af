"""Programs of recorded kernel calls: what they give, and what is not recorded."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from medusa_runtime import kernels
from medusa_runtime.kernels import native
from medusa_runtime.kernels.compiled import native_kernels
from medusa_runtime.kernels.recording import Program, Recorder
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HEADS, HEAD_DIM, BLOCK, HIDDEN, WIDE = 4, 16, 16, 64, 96


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def library() -> native.NativeKernels:
    found = native_kernels()
    if isinstance(found, str):
        pytest.skip(found)
    return found


class Layer:
    """A decoder layer over ``rows`` sequences that each have ``past`` tokens in the cache."""

    def __init__(self, dtype: torch.dtype, rows: int, past: int) -> None:
        def some(*sizes: int) -> Tensor:
            return (torch.randn(sizes) / math.sqrt(sizes[-1])).to(dtype)

        torch.manual_seed(0)
        self.qkv, self.out = [some(HIDDEN, HIDDEN) for _ in range(3)], some(HIDDEN, HIDDEN)
        self.gate_up, self.down = [some(WIDE, HIDDEN) for _ in range(2)], some(HIDDEN, WIDE)
        self.norm, self.bias = some(HIDDEN), some(HIDDEN)
        self.pool = some(2, 64, BLOCK, HEADS, HEAD_DIM)
        self.begin(dtype, rows, past)

    def begin(self, dtype: torch.dtype, rows: int, past: int) -> None:
        """A step whose positions, blocks and inputs are new."""
        blocks = past // BLOCK + 1
        self.tables = torch.randperm(64)[: rows * blocks].view(rows, blocks).to(torch.int32)
        self.rows = torch.arange(rows, dtype=torch.int32)
        self.contexts = torch.full((rows,), past + 1, dtype=torch.int32)
        self.slots = self.tables[:, past // BLOCK].long() * BLOCK + past % BLOCK
        self.cos, self.sin = torch.randn(2, rows, 1, HEAD_DIM).to(dtype)
        self.hidden = torch.randn(rows, HIDDEN).to(dtype)

    def inputs(self) -> Any:
        places = (self.hidden, self.slots, self.tables, self.rows, self.contexts, self.cos, self.sin)
        return (ctypes.c_void_p * native.INPUTS)(None, self.tables.stride(0), *(place.data_ptr() for place in places))

    def constants(self) -> list[Tensor]:
        return [*self.qkv, self.out, *self.gate_up, self.down, self.norm, self.bias, self.pool]

    def __call__(self) -> Tensor:
        keys, values = self.pool
        x = kernels.rms_norm(self.hidden, self.norm, 1e-5)
        q, k, v = (one.view(-1, HEADS, HEAD_DIM) for one in kernels.linears(x, self.qkv, [None, self.bias, None]))
        q, k = kernels.rotate(q, k, self.cos, self.sin)
        kernels.write_kv(keys.flatten(0, 1), values.flatten(0, 1), self.slots, k, v)
        out = kernels.paged_attention(q, keys, values, self.tables, self.rows, self.contexts, scale=0.25)
        hidden = kernels.linear(out.view(-1, HIDDEN), self.out, None, self.hidden)
        gate, up = kernels.linears(hidden, self.gate_up, [None, None])
        return hidden + kernels.linear(kernels.silu_gate(gate, up), self.down)


def record(
    library: native.NativeKernels, layer: Layer, run: Callable[[], Any], size: int = 1 << 20
) -> tuple[Any, Program | None]:
    recorder = Recorder(library, torch.empty(size, dtype=torch.uint8), layer.inputs()[2:9], layer.constants())
    with recorder:
        result = run()
    assert recorder.is_short == (size < 1 << 20)
    return result, recorder.program(result)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_a_program_gives_the_same_bits_from_other_inputs(
    library: native.NativeKernels, dtype: torch.dtype, rows: int
) -> None:
    layer = Layer(dtype, rows, past=20)
    expected = layer()
    result, program = record(library, layer, layer)
    assert torch.equal(result, expected)
    path = kernels._path(dtype)
    if path.compiled is None or path.most_rows < rows:  # as fp16 on a CPU with avx512_fp16: products are torch's there
        assert program is None
        return
    assert program is not None
    for past in (20, 50, 33):  # tables of other widths
        layer.begin(dtype, rows, past)
        before = layer.pool.clone()
        expected, written = layer(), layer.pool.clone()
        layer.pool.copy_(before)
        found = program(layer.inputs())
        assert torch.equal(found, expected)
        assert torch.equal(layer.pool, written)
        assert not torch.equal(written, before)


def test_what_a_program_returns_outlives_its_next_run(library: native.NativeKernels) -> None:
    layer = Layer(torch.float32, 2, past=3)
    program = record(library, layer, layer)[1]
    assert program is not None
    first = program(layer.inputs())
    kept = first.clone()
    layer.hidden = layer.hidden + 1
    assert not torch.equal(program(layer.inputs()), kept)
    assert torch.equal(first, kept)


def test_other_operations_and_unknown_tensors_are_not_recorded(library: native.NativeKernels) -> None:
    layer = Layer(torch.float32, 2, past=3)
    stranger = torch.randn(HIDDEN)
    runs: list[Callable[[], Any]] = [
        lambda: layer() * 2,
        lambda: layer().sum(),
        lambda: layer().add_(1),
        lambda: layer() + 1,
        lambda: layer.hidden,  # not made in the arena
        lambda: (layer(), None),
        lambda: kernels.rms_norm(layer.hidden, stranger, 1e-5),
        lambda: kernels.linear(layer.hidden, layer.out, stranger),
        lambda: layer() + torch.randn(2, HIDDEN),
        lambda: layer() if layer().sum() > 0 else layer.hidden,
    ]
    assert [record(library, layer, run)[1] for run in runs] == [None] * len(runs)
    assert record(library, layer, layer)[1] is not None


def test_a_small_arena_gives_the_result_and_no_program(library: native.NativeKernels) -> None:
    layer = Layer(torch.float32, 2, past=3)
    expected = layer()
    result, program = record(library, layer, layer, size=1024)
    assert program is None
    assert torch.equal(result, expected)


def test_calls_of_other_threads_are_not_recorded(library: native.NativeKernels) -> None:
    from concurrent.futures import ThreadPoolExecutor

    layer, other = (Layer(torch.float32, 2, past=3) for _ in range(2))

    def alone() -> Tensor:
        with torch.inference_mode():
            return other()

    def both() -> Tensor:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(alone).result()
        return layer()

    program = record(library, layer, both)[1]
    assert program is not None
    layer.hidden, before = layer.hidden + 1, other.pool.fill_(7).clone()
    assert torch.equal(program(layer.inputs()), layer())
    assert torch.equal(other.pool, before)
